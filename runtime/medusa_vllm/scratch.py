"""A temporary folder for when vLLM or torch wants paths. It is removed even if the process is killed."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Ends when the other end of its standard input is closed: this process has left the context, or has died.
_GUARD = ("/bin/sh", "-c", 'read -r _; exec rm -rf -- "$0"')


@contextmanager
def scratch_folder(name: str) -> Iterator[Path]:
    """Make a private temporary folder for this context. Raises OSError if that fails."""
    path = Path(tempfile.gettempdir(), f"{name}-{secrets.token_hex(8)}")
    guard = _guard(path)  # started before there is anything to remove
    try:
        path.mkdir(mode=0o700)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if guard is not None:
            guard.communicate()


def _guard(path: Path) -> subprocess.Popen[bytes] | None:
    try:
        # In its own session, so that a signal to the process group does not end it.
        return subprocess.Popen([*_GUARD, os.fspath(path)], stdin=subprocess.PIPE, start_new_session=True)
    except OSError:  # no shell, or no more processes: then only a killed engine leaves its folder behind
        return None


__all__ = ["scratch_folder"]
