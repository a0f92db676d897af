"""Our vLLM engine with a state bundle. It must start with compiled code and compile nothing itself."""

from __future__ import annotations

import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from medusa_adapters.bench.coldstart.contestants import Medusa, Question, Sample
from medusa_adapters.bench.coldstart.prewarmed import PrewarmedMedusa
from medusa_adapters.bench.coldstart.resumed import ResumedMedusa
from medusa_adapters.bench.served_instance import ServedInstance
from medusa_runtime.errors import MedusaError

_MATERIALIZE_TIMEOUT_S = 3600.0


class Bundled:
    """Folders with links to a checkpoint's files and a state bundle beside them. Each is made at its first use."""

    def __init__(self, command: list[str], engine: str) -> None:
        self._command = [*command, "materialize", "--engine", engine, "--starts", "0"]
        self._scratch = tempfile.TemporaryDirectory(prefix="medusa-bench-bundle-")
        self._made: dict[str, Path] = {}

    def of(self, folder: str, *flags: str) -> str:
        """Return the folder with links and a bundle for a checkpoint's folder. The first call takes a minute or more.

        ``flags`` are further ones of `medusa materialize`, the same in all calls. Raises MedusaError when that fails,
        with what it printed.
        """
        if folder not in self._made:
            place = Path(self._scratch.name) / str(len(self._made))
            place.mkdir()
            for file in Path(folder).iterdir():
                if file.is_file():
                    (place / file.name).symlink_to(file)
            command = [*self._command, "--model", str(place), *flags]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_MATERIALIZE_TIMEOUT_S)
            if done.returncode:
                raise MedusaError(f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr[-800:]}")
            self._made[folder] = place
        return str(self._made[folder])

    def close(self) -> None:
        self._scratch.cleanup()


class _Bundled(Medusa):
    """A contestant with the compile cache of a bundle. It must start with that, and compile nothing itself."""

    bundled: Bundled

    def prepared(self, question: Question) -> Question:
        return replace(super().prepared(question), model=self.bundled.of(question.folder))

    def sample(self, question: Question) -> Sample:
        sample = super().sample(question)
        check_attached(self.name, sample)
        return sample

    def check(self, instance: ServedInstance) -> None:
        super().check(instance)
        check_nothing_compiled(instance)

    def close(self) -> None:
        super().close()
        self.bundled.close()


class Compiled(_Bundled, PrewarmedMedusa):
    """The contestant `vllm-compiled`: a pre-warmed engine process."""

    def __init__(self, *, name: str, python: str) -> None:
        super().__init__("vllm", name=name, python=python)
        self.bundled = Bundled(self.command, "vllm")


class ResumedCompiled(_Bundled, ResumedMedusa):
    """The contestant `vllm-snapshot-compiled`: a process that continues from a snapshot."""

    def __init__(self, *, name: str, python: str) -> None:
        super().__init__("vllm", name=name, python=python)
        self.bundled = Bundled(self.command, "vllm")


def check_attached(name: str, sample: Sample) -> None:
    """Raise MedusaError if the start ran eagerly, without the compiled functions of the bundle."""
    if not any(stage.name == "compiled_attach" and stage.detail.get("functions") for stage in sample.stages):
        reasons = [stage.detail["left_out"] for stage in sample.stages if stage.detail.get("left_out")]
        raise MedusaError(f"{name}: expected a compiled start, found an eager one: {'; '.join(reasons) or 'no cache'}")


def check_nothing_compiled(instance: ServedInstance) -> None:
    """Raise MedusaError if the engine process has traced, generated or built anything."""
    count = instance.metric("medusa_engine_compilations_total")
    if count != 0:
        found = "no count" if count is None else f"{count:.0f}"
        raise instance.failure(f"compiled something: expected 0 compilations, found {found}")
