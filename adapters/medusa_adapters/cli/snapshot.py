"""`medusa snapshot`: save a process of `medusa serve` that has imported everything, for starts to continue from."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from medusa_runtime.errors import StateError
from medusa_snapshot.conditions import variables
from medusa_snapshot.resuming import MEMORY, default_folder, place

from . import serving_process
from .progress import size

_SAVE = "import sys; from medusa_adapters.cli.serving_process import main; sys.exit(main())"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Save a process that has imported all that `medusa serve` imports. Starts with the same processor, "
        "installation and environment then continue from it in place of importing. Run it again after an update."
    )
    parser.add_argument(
        "--engine", choices=serving_process.VARIABLES, default="torch", help="for starts with it (torch: and none)"
    )
    parser.add_argument("--out", metavar="DIR", help="the folder for snapshots (default: the installation's)")
    parser.add_argument("--remove", action="store_true", help="remove the snapshot for this machine's processor")


def run(arguments: argparse.Namespace) -> int:
    folder = os.path.abspath(arguments.out or default_folder())
    target = Path(place(folder, arguments.engine))
    if arguments.remove:
        try:
            shutil.rmtree(target)
        except FileNotFoundError:
            raise StateError(f"expected the snapshot {target}, found none") from None
        except OSError as error:
            raise StateError(f"{target} cannot be removed: {error.strerror}") from None
        print(f"removed {target}")
        return 0
    os.umask(0o022)  # others may use it
    start = time.monotonic()
    _save(folder, arguments.engine)
    saved_s = time.monotonic() - start
    print(f"{target}: {size((target / MEMORY).stat().st_size)}, saved after {saved_s:.1f} s")
    return 0


def _save(folder: str, engine: str) -> None:
    """Save a new process. Its environment is not this one's, which may have secrets: others may read the snapshot."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LC_ALL", "TZ") if name in os.environ}
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        found = subprocess.run(
            [sys.executable, "-c", _SAVE, folder, engine],
            env={**kept, **variables(os.environ, serving_process.VARIABLES[engine])},
            cwd="/",  # gunicorn, as it was imported, expects this folder to exist
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    except OSError as error:
        hint = "choose another folder with --out, and name it in --snapshots"
        raise StateError(f"{folder}: {error.strerror}; {hint}") from None
    if found.returncode:
        raise StateError(f"no snapshot was made: {found.stderr.strip()[-2000:]}")
