"""A folder for the moment in which vLLM or torch wants paths; it is gone when that ends, also by SIGKILL."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Ends when nobody has the other end of its standard input: this process has left the context, or has died.
_GUARD = ("/bin/sh", "-c", 'read -r _; exec rm -rf -- "$0"')


@contextmanager
def scratch_folder(name: str) -> Iterator[Path]:
    """A private folder in the temporary one. Raises OSError where none can be made."""
    path = Path(tempfile.gettempdir(), f"{name}-{secrets.token_hex(8)}")
    guard = _guard(path)  # before there is anything to remove
    try:
        path.mkdir(mode=0o700)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if guard is not None:
            guard.communicate()


def _guard(path: Path) -> subprocess.Popen[bytes] | None:
    try:
        # A session of its own: what ends a process group does not end this.
        return subprocess.Popen([*_GUARD, os.fspath(path)], stdin=subprocess.PIPE, start_new_session=True)
    except OSError:  # no shell, or no more processes: only a killed engine then leaves its folder
        return None


__all__ = ["scratch_folder"]
