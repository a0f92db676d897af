"""The command ``medusa``, run to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MEDUSA = Path(sys.executable).with_name("medusa")


def medusa(*arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Without the settings of whoever runs the tests."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MEDUSA_")}
    return subprocess.run([MEDUSA, *arguments], capture_output=True, text=True, timeout=240, env=environ, cwd=cwd)
