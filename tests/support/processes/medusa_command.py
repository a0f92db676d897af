"""The command `medusa` in this process: its arguments, environment, output and status as a user's shell has them.

For commands that print and end. What depends on signals, on processes or on imports is tested with a real process.
"""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
from pathlib import Path
from unittest.mock import patch

from medusa_adapters.cli.main import main
from plain_environ import plain_environ


def medusa(
    *arguments: str | Path, folder: Path | None = None, environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one command, in this environment without MEDUSA_* and with ``environ``."""
    clean = plain_environ()
    command = [str(argument) for argument in arguments]
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, clean | (environ or {}), clear=True))
        stack.enter_context(contextlib.redirect_stdout(output))
        stack.enter_context(contextlib.redirect_stderr(errors))
        if folder is not None:
            stack.enter_context(contextlib.chdir(folder))
        try:
            status = main(command)
        except SystemExit as ended:  # --help and --version
            status = ended.code if isinstance(ended.code, int) else 0
    return subprocess.CompletedProcess(command, status, output.getvalue(), errors.getvalue())
