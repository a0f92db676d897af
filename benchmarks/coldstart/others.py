"""Contestants that are not ours: transformers, and yardsticks, which do a part of the work and return no text."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path

from medusa_adapters.bench.coldstart.contestants import Contestant, Question, Sample
from medusa_adapters.bench.process import Process, pss_bytes, rss_bytes
from medusa_runtime.errors import MissingPackageError

SCRIPTS = Path(__file__).parent / "scripts"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class _Nothing:
    """A contestant that keeps nothing from one sample to the next."""

    def close(self) -> None:
        pass


class Transformers(_Nothing):
    """A bare script that loads AutoTokenizer and AutoModelForCausalLM from the folder and generates the text.

    The sample's first token comes from one forward pass.
    """

    name = "transformers"

    def sample(self, question: Question) -> Sample:
        script = str(SCRIPTS / "transformers_generate.py")
        command = [sys.executable, script, question.folder, question.prompt, str(question.max_tokens)]
        with Process(command, OFFLINE) as process:
            first = json.loads(process.line())["text"]
            ttft_s, pids = process.since_start_s(), process.tree()
            memory = {"pss_mb": pss_bytes(pids) / 1e6, "rss_mb": rss_bytes(pids) / 1e6}
            text = json.loads(process.line())["text"]
            return Sample(ttft_s, text, first, **memory)


class Script(_Nothing):
    """A yardstick: a process that does a part of the work. Its first line of output ends the sample."""

    def __init__(self, name: str, arguments: Callable[[Question], list[str]], *, python: str = sys.executable) -> None:
        self.name = name
        self._arguments = arguments
        self._python = python

    def sample(self, question: Question) -> Sample:
        with Process([self._python, *self._arguments(question)]) as process:
            process.line()
            return Sample(process.since_start_s())


def yardsticks() -> list[Contestant]:
    return [
        Script("torch-import", lambda _: ["-c", "import torch; print(torch.__version__, flush=True)"]),
        Script("floor", lambda question: [str(SCRIPTS / "floor.py"), question.folder, question.prompt]),
    ]


def transformers() -> Transformers:
    """Return the contestant `transformers`. Raises MissingPackageError if it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise MissingPackageError("--vs transformers: it is not installed; pip install transformers")
    return Transformers()
