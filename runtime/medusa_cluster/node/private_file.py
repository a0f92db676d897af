"""Files with secrets, which a node's processes read while they may be replaced."""

from __future__ import annotations

import os
from pathlib import Path


def write_private(path: Path, content: bytes) -> None:
    """Replace a file at once, readable by this user alone: who reads it meanwhile finds the old or the new one."""
    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(content)
    part.rename(path)


__all__ = ["write_private"]
