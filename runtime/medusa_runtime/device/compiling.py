"""Compile small C files of this package when they are needed, which is only offline."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import DeviceError


@contextmanager
def compile_library(source: Path) -> Iterator[Path]:
    """Compile a C file, and yield the path of the shared library.

    The file is deleted at the end of the context, but a library that was loaded stays loaded. Raises DeviceError if it
    cannot be compiled (with ``$CC``, by default ``cc``).
    """
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, source.with_suffix(".so").name)
        command = [*shlex.split(os.environ.get("CC") or "cc"), "-O2", "-shared", "-fPIC", "-pthread", "-o", str(made)]
        try:
            subprocess.run([*command, str(source), "-ldl"], check=True, capture_output=True, timeout=100)
        except (OSError, subprocess.SubprocessError) as error:
            raise DeviceError(f"{source.name} cannot be compiled ({error}); install a C compiler, or set CC") from error
        yield made


__all__ = ["compile_library"]
