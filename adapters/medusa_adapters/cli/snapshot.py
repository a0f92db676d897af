"""`medusa snapshot`: save a process of `medusa serve` that has imported everything, for starts to continue from."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from medusa_runtime.checkpoint.reader import open_checkpoint
from medusa_runtime.config import from_env
from medusa_runtime.device.choice import installed_cuda
from medusa_runtime.errors import ConfigError, MedusaError, StateError
from medusa_runtime.process import die_with_parent
from medusa_runtime.storage.base import redacted
from medusa_snapshot.conditions import variables
from medusa_snapshot.resuming import MEMORY, default_folder, place
from medusa_snapshot.saving import leave_room, remove_unfinished

from . import serving_process
from .progress import size

_SAVE = "import sys; from medusa_adapters.cli.serving_process import main; sys.exit(main())"
_LONGEST_S = 86_400
_MOST_FRAMES = 8  # that are shown of what has not ended


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
        "--model", metavar="URL", action="append", default=[],
        help="also keep this model's tokenizer, so that its starts need not read it; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--if-possible",
        action="store_true",
        help="where none can be made, or starts from one are untried, say why, and end with status 0",
    )
    parser.add_argument("--out", metavar="DIR", help="the folder for snapshots (default: the installation's)")
    parser.add_argument(
        "--timeout-s", type=_timeout, default=600, metavar="SECONDS",
        help="how long the imports may take; after that, the command says what has not ended (default: 600)",
    )  # fmt: skip
    parser.add_argument("--remove", action="store_true", help="remove the snapshot for this machine's processor")


def _engine(environ: Mapping[str, str]) -> str:
    """Return the engine for whose starts a snapshot is made if the command line does not say. Unknown ones stay."""
    engine = environ.get("MEDUSA_ENGINE") or "torch"
    return serving_process.snapshot_of(engine) or engine


def _untried(engine: str) -> str | None:
    if engine == "torch" and installed_cuda() is not None:
        return "on a GPU, starts from one are untried"
    return f"a start from one {tried}" if (tried := serving_process.on_aarch64()) else None


def _timeout(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= _LONGEST_S):
        raise argparse.ArgumentTypeError(f"expected whole seconds from 1 to {_LONGEST_S}, found {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    folder = os.path.abspath(arguments.out or default_folder())
    target = Path(place(folder, arguments.engine))
    if arguments.remove:
        remove_unfinished(target)
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
        if arguments.engine == "vllm" and serving_process.on_aarch64():
            raise StateError("no snapshot was made: with vLLM there are snapshots on x86-64 only")
        if arguments.if_possible and (why := _untried(arguments.engine)) is not None:
            raise StateError(f"no snapshot was made: {why}; `medusa snapshot` makes one")
        _save(folder, arguments.engine, arguments.timeout_s, list(map(_tokenizer, arguments.model)))
    except MedusaError as error:
        remove_unfinished(target)
        if not arguments.if_possible:
            raise
        print(error)
        return 0
    saved_s = time.monotonic() - start
    print(f"{target}: {size((target / MEMORY).stat().st_size)}, saved after {saved_s:.1f} s")
    return 0


def _tokenizer(url: str) -> bytes:
    """Return the tokenizer.json of a model. Raises ConfigError if it has none."""
    model = from_env({}, model=url).model
    checkpoint = open_checkpoint(model or "")
    checkpoint.store.close()
    try:
        return checkpoint.files["tokenizer.json"]
    except KeyError:
        raise ConfigError(f"--model={redacted(url)}: expected a model with a tokenizer.json, found none") from None


def _save(folder: str, engine: str, timeout_s: int, tokenizers: Sequence[bytes]) -> None:
    """Save a new process. Its environment is not this one's, which may have secrets: others may read the snapshot.

    ``tokenizers`` has the tokenizer.json of each model whose tokenizer it keeps.
    """
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "LC_ALL", "TZ") if name in os.environ}
    parent = os.getpid()
    try:
        temporary = tempfile.gettempdir()  # this command's own, which is removed however the process ends
    except OSError as error:
        raise StateError(f"no snapshot was made: {error.strerror}; set TMPDIR to one that can be written to") from None

    def prepare() -> None:
        die_with_parent(parent)
        signal.alarm(timeout_s)
        leave_room()

    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=temporary, prefix="medusa-tokenizers-") as given:
            for number, data in enumerate(tokenizers):
                Path(given, str(number)).write_bytes(data)
            found = subprocess.run(
                [sys.executable, "-c", _SAVE, folder, engine, given],
                env={**kept, **variables(os.environ, serving_process.VARIABLES[engine]), "TMPDIR": temporary},
                cwd="/",  # gunicorn, as it was imported, expects this folder to exist
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False,
                errors="replace", preexec_fn=prepare,
            )  # fmt: skip
    except OSError as error:
        raise StateError(f"{folder}: {error.strerror}; {serving_process.OTHER_FOLDER}") from None
    if found.returncode == -signal.SIGALRM:
        _, _, frames = found.stderr.rpartition("(most recent call first):\n")
        shown = [line for line in frames.splitlines() if "<frozen importlib" not in line][:_MOST_FRAMES]
        where = "\n".join((", and were here, the latest call first:", *shown)) if shown else ""
        raise StateError(f"no snapshot was made: the imports took longer than --timeout-s={timeout_s}{where}")
    if found.returncode:
        killed = f"its process was killed by signal {-found.returncode} " if found.returncode < 0 else ""
        raise StateError(f"no snapshot was made: {killed}{found.stderr.strip()[-2000:]}".strip())
