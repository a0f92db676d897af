"""`medusa serve` that continues from a snapshot, which is made before anything is measured."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace

from medusa_runtime.errors import MedusaError

from ..process import Process
from ..served_instance import ServedInstance
from .contestants import Medusa, Question, Sample


class Snapshot:
    """A snapshot of an engine in a folder of its own, made at its first use."""

    def __init__(self, medusa: Sequence[str], engine: str) -> None:
        self._medusa = medusa
        self._engine = engine
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def env(self, model: str | None = None) -> dict[str, str]:
        """Return what lets a command continue from it, which may have the tokenizer of a ``model``.

        Raises MedusaError where no snapshot can be made.
        """
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="medusa-snapshot-")
            command = [*self._medusa, "snapshot", "--engine", self._engine, "--out", self._folder.name]
            command += [] if model is None else ["--model", model]
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                raise MedusaError(f"medusa snapshot: {made.stderr.strip()}")
        return {"MEDUSA_SNAPSHOTS": self._folder.name}

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()


class ResumedMedusa(Medusa):
    """`medusa serve` with a snapshot. Raises MedusaError where none can be made, or a start does not use it.

    Without ``tokenizer``, the snapshot is one for any model.
    """

    def __init__(
        self,
        engine: str,
        *,
        name: str,
        python: str = sys.executable,
        flags: tuple[str, ...] = (),
        tokenizer: bool = True,
    ) -> None:
        super().__init__(engine, name=name, python=python, flags=flags)
        self._snapshot = Snapshot(self.command, engine)
        self._tokenizer = tokenizer

    def prepared(self, question: Question) -> Question:
        model = (question.folder or question.model) if self._tokenizer else None
        return replace(question, env={**question.env, **self._snapshot.env(model)})

    def sample(self, question: Question) -> Sample:
        return super().sample(self.prepared(question))

    def check(self, instance: ServedInstance) -> None:
        check_continues(instance)

    def close(self) -> None:
        self._snapshot.close()


def continues(pid: int) -> bool:
    """Return whether this process continues from a snapshot."""
    return os.readlink(f"/proc/{pid}/exe").endswith("/medusa-resume")


def check_continues(process: Process) -> None:
    """Raise MedusaError if this process does not continue from a snapshot."""
    if not continues(process.pid):
        raise process.failure("did not use the snapshot, expected it to continue from it")
