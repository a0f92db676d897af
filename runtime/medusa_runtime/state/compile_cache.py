"""The compile cache of a state bundle: what compiling a model made, as one file for any process on a like machine.

Offline, ``capture`` starts the engine once in a process of its own, with empty caches, and packs what came of it.
Online, ``restore`` unpacks that into a private folder before the engine makes its model; the engine's worker attaches
it to the model. The file holds no path, host name or user of the machine it was made on. What it is valid for (engine,
torch, Python, CPU, model) is its key in the manifest; what only vLLM can tell is checked when it is attached.
"""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import zipfile
import zlib
from dataclasses import asdict
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ..config import Settings
from ..errors import StateError

_CAPTURES = {"vllm": "medusa_runtime.engine.vllm.capture"}  # the engines stand above this package
_CAPTURE_TIMEOUT_S = 3600.0
_MODEL = "model-1"  # the folder within; another number is another format
# What zipfile raises for bytes that are no archive, or an archive with wrong bytes in it.
_DAMAGE: tuple[type[Exception], ...] = (zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, OverflowError)
_DAMAGE += (KeyError, ValueError, RuntimeError)


def capture(model: str, settings: Settings, folder: Path) -> Path:
    """Start the engine on ``model`` so that it compiles, in a new process; the file, which lies in ``folder``.

    Raises StateError with the last thing that the process said when it fails or takes an hour.
    """
    made, blob = folder / "made", folder / "compile-cache"
    made.mkdir(parents=True)
    command = [sys.executable, "-m", _CAPTURES[settings.engine], model, str(made)]
    try:
        subprocess.run(
            command,
            input=json.dumps(asdict(settings)),
            env={**os.environ, **cache_folders(folder / "caches")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=True,
            timeout=_CAPTURE_TIMEOUT_S,
        )
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines() or [f"status {error.returncode}"]
        raise StateError(f"the model could not be compiled: {said[-1][-500:]}") from None
    except subprocess.TimeoutExpired:
        raise StateError(f"the model could not be compiled within {_CAPTURE_TIMEOUT_S / 60:.0f} minutes") from None
    return pack(made, blob)


def pack(folder: Path, blob: Path) -> Path:
    """Write what lies in ``folder`` (a CompiledModel's) into the file ``blob``, and return it."""
    with zipfile.ZipFile(blob, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, f"{_MODEL}/{path.relative_to(folder).as_posix()}")
    return blob


class Restored(NamedTuple):
    """``folder``: a CompiledModel's. ``env``: what keeps the engine's own caches beside it."""

    folder: Path
    env: dict[str, str]


def restore(blob: Path | bytes, folder: Path) -> Restored:
    """Unpack into ``folder``, which is private to this instance.

    Raises StateError when the file is damaged or of another format; the engine then compiles as if there were none.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(blob) if isinstance(blob, bytes) else blob) as archive:
            for name in archive.namelist():
                _write(folder, name, archive.read(name))  # checks its CRC
    except _DAMAGE as error:
        raise StateError(f"the compile cache cannot be read ({error}); materialize it again") from error
    return Restored(folder / _MODEL, cache_folders(folder))


def cache_folders(folder: Path) -> dict[str, str]:
    """The environment that keeps every cache of vLLM, Inductor and Triton within ``folder``."""
    return {
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


def _write(folder: Path, name: str, data: bytes) -> None:
    parts = PurePosixPath(name).parts
    if len(parts) < 2 or parts[0] != _MODEL or ".." in parts:
        raise StateError(f"the compile cache holds {name!r}, expected files under {_MODEL}/; materialize it again")
    path = folder.joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
