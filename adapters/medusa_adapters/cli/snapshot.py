"""`medusa snapshot`: save a process of `medusa serve` that has imported everything, for starts to continue from."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from medusa_runtime.device.choice import installed_cuda
from medusa_runtime.errors import ConfigError, MedusaError, StateError
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
        "--engine", choices=serving_process.VARIABLES, default=_engine(os.environ),
        help="for starts with this engine; torch: and for those with none (default: MEDUSA_ENGINE's, or torch)",
    )  # fmt: skip
    parser.add_argument(
        "--if-possible",
        action="store_true",
        help="where none can be made, or torch is built for GPUs, say why, and end with status 0",
    )
    parser.add_argument("--out", metavar="DIR", help="the folder for snapshots (default: the installation's)")
    parser.add_argument("--remove", action="store_true", help="remove the snapshot for this machine's processor")


def _engine(environ: Mapping[str, str]) -> str:
    """Return the engine for whose starts a snapshot is made if the command line does not say. Unknown ones stay."""
    engine = environ.get("MEDUSA_ENGINE") or "torch"
    return serving_process.snapshot_of(engine) or engine


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
    try:
        if arguments.engine not in serving_process.VARIABLES:
            expected = " or ".join(serving_process.VARIABLES)
            raise ConfigError(f"MEDUSA_ENGINE={arguments.engine}: there are snapshots for {expected} only")
        if arguments.if_possible and arguments.engine == "torch" and installed_cuda() is not None:
            raise StateError("no snapshot was made: on a GPU, starts from one are untried; `medusa snapshot` makes one")
        _save(folder, arguments.engine)
    except MedusaError as error:
        if not arguments.if_possible:
            raise
        print(error)
        return 0
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
