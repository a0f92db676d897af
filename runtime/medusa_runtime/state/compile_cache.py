"""The compile cache of a state bundle: what compiling a model made, as one file for any process on a like machine.

Offline, ``capture`` starts the engine once in a process of its own, with empty caches, and packs what came of it.
Online, ``restore`` unpacks that into a private folder before the engine makes its model; the engine's worker attaches
it to the model. The file holds no path, host name or user of the machine it was made on. What it is valid for (engine,
torch, Python, CPU, model) is its key in the manifest; what only vLLM can tell is checked when it is attached.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import Path, PurePosixPath

from ..errors import StateError

FOLDER_VARIABLE = "MEDUSA_COMPILED_MODEL"  # tells an engine's worker where the restored folder is
CAPTURE_VARIABLE = "MEDUSA_COMPILED_MODEL_CAPTURE"  # … and where to write one
_MODEL = "model-1"  # the folder within; another number is another format
# What zipfile raises for bytes that are no archive, or an archive with wrong bytes in it.
_DAMAGE: tuple[type[Exception], ...] = (zipfile.BadZipFile, zlib.error, struct.error, OSError, EOFError, OverflowError)
_DAMAGE += (KeyError, ValueError, RuntimeError)


def pack(folder: Path, blob: Path) -> Path:
    """Write what lies in ``folder`` (a CompiledModel's) into the file ``blob``, and return it."""
    with zipfile.ZipFile(blob, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, f"{_MODEL}/{path.relative_to(folder).as_posix()}")
    return blob


def restore(blob: Path | bytes, folder: Path) -> dict[str, str]:
    """Unpack into ``folder`` (private to this instance); the environment that makes an engine use it.

    Raises StateError when the file is damaged or of another format; the engine then compiles as if there were none.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(blob) if isinstance(blob, bytes) else blob) as archive:
            for name in archive.namelist():
                _write(folder, name, archive.read(name))  # checks its CRC
    except _DAMAGE as error:
        raise StateError(f"the compile cache cannot be read ({error}); materialize it again") from error
    return {**cache_folders(folder), FOLDER_VARIABLE: str(folder / _MODEL)}


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
