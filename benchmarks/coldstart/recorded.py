"""Our torch engine with a state bundle that has the prompt's keys and values. It must start with them."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from medusa_adapters.bench.coldstart.contestants import Medusa, Question, Sample
from medusa_runtime.errors import MedusaError
from medusa_runtime.state.bundle.locate import FOLDER

from benchmarks.coldstart.compiled import Bundled


class Recorded(Medusa):
    """The contestant `torch-prompts`. The bundle is on this machine, wherever the weights come from."""

    def __init__(self, *, name: str) -> None:
        super().__init__("torch", name=name)
        self._bundled = Bundled(self.command, "torch")

    def prepared(self, question: Question) -> Question:
        with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
            request = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": question.body}
            file.write(json.dumps(request) + "\n")
            file.flush()
            bundle = Path(self._bundled.of(question.folder, "--prompts", file.name)) / FOLDER
        return replace(question, flags=(*question.flags, "--state", str(bundle)))

    def sample(self, question: Question) -> Sample:
        sample = super().sample(self.prepared(question))
        computed = [stage.detail["tokens"] for stage in sample.stages if stage.name == "first_forward"]
        if computed and computed[0] > 32:
            raise MedusaError(f"{self.name}: expected a first forward of at most 32 tokens, found {computed[0]}")
        return sample

    def close(self) -> None:
        self._bundled.close()


__all__ = ["Recorded"]
