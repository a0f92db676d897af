"""The snapshot of a process that a test makes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from medusa_snapshot.resuming import place
from medusa_snapshot.saving import leave_room

_PROCESS = Path(__file__).with_name("process.py")


class Saved:
    """The snapshot of a process that has executed some code."""

    def __init__(self, folder: Path, code: str, environ: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.place = Path(place(str(folder), "test"))
        self.body = folder / "body.py"
        self.body.write_text(textwrap.dedent(code))
        self.output = self._run("save", (), environ or {}, preexec_fn=leave_room).stdout

    def _run(
        self, what: str, arguments: Sequence[str], environ: Mapping[str, str], **options: object
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(what, *arguments), env={**os.environ, **environ}, text=True, check=False, timeout=60,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options,
        )  # type: ignore[call-overload,no-any-return]  # fmt: skip

    def command(self, what: str, *arguments: str) -> list[str]:
        return [sys.executable, str(_PROCESS), what, str(self.folder), str(self.body), *arguments]

    def resume(self, *arguments: str, environ: Mapping[str, str] | None = None, **options: object) -> str:
        """Continue, and return what the process writes. It must end with status 0."""
        done = self._run("resume", arguments, environ or {}, **options)
        assert done.returncode == 0, done
        return done.stdout
