"""The command `medusa` as a process that runs to its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from plain_environ import plain_environ

MEDUSA = Path(sys.executable).with_name("medusa")


def medusa(
    *arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Without the settings of whoever runs the tests, but with ``env``."""
    environ = plain_environ() | (env or {})
    return subprocess.run([MEDUSA, *arguments], capture_output=True, text=True, timeout=240, env=environ, cwd=cwd)
