"""`medusa serve` that continues from a snapshot, which is made before anything is measured."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace

from medusa_runtime.errors import MedusaError

from ..served_instance import ServedInstance
from .contestants import Medusa, Question, Sample


class ResumedMedusa(Medusa):
    """`medusa serve` with a snapshot. Raises MedusaError where none can be made, or a start does not use it."""

    def __init__(self, engine: str, *, name: str, python: str = sys.executable, flags: tuple[str, ...] = ()) -> None:
        super().__init__(engine, name=name, python=python, flags=flags)
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def prepared(self, question: Question) -> Question:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="medusa-snapshot-")
            command = [*self.command, "snapshot", "--engine", self.engine, "--out", self._folder.name]
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                raise MedusaError(f"medusa snapshot: {made.stderr.strip()}")
        return replace(question, env={**question.env, "MEDUSA_SNAPSHOTS": self._folder.name})

    def sample(self, question: Question) -> Sample:
        return super().sample(self.prepared(question))

    def check(self, instance: ServedInstance) -> None:
        program = os.readlink(f"/proc/{instance.pid}/exe")
        if not program.endswith("/medusa-resume"):
            raise instance.failure(f"runs {program}, expected it to continue from the snapshot")

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
