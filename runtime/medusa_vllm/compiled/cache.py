"""The compile cache of a state bundle: compiled code as one file, for any process on a similar machine.

Offline, ``capture`` starts the engine once in a new process, with empty caches, and packs what was compiled. Online,
the engine's worker unpacks it with ``restore`` and attaches it to its model. The file contains no path, host name or
user of the machine it was made on. Its key in the manifest says what it is valid for (engine, torch, Python, CPU,
model). What only vLLM can decide is checked before the code is used.
"""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from medusa_runtime.config import Settings
from medusa_runtime.errors import StateError
from medusa_runtime.state.offline import run_module

_CAPTURE = "medusa_vllm.compiled.capture"
_MODEL = "model-1"  # the folder in the archive; another number is another format
# Errors that zipfile raises for bytes that are not an archive, and for a damaged archive.
_DAMAGE_ERRORS: tuple[type[Exception], ...] = (
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    OSError,
    EOFError,
    OverflowError,
)
_DAMAGE_ERRORS += (KeyError, ValueError, RuntimeError)


def capture(model: str, settings: Settings, folder: Path) -> Path:
    """Start the engine on ``model`` in a new process so that it compiles, and return the file, in ``folder``.

    Raises StateError with the last line of the process's output when it fails or takes an hour.
    """
    made, blob = folder / "made", folder / "compile-cache"
    made.mkdir(parents=True)
    caches = cache_folders(folder / "caches")
    run_module(_CAPTURE, [model, str(made)], settings, "the model could not be compiled", caches)
    return pack(made, blob)


def pack(folder: Path, blob: Path) -> Path:
    """Write the content of ``folder`` (a CompiledModel's) to the file ``blob``, and return it."""
    with zipfile.ZipFile(blob, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.write(path, f"{_MODEL}/{path.relative_to(folder).as_posix()}")
    return blob


def restore(blob: bytes, folder: Path) -> Path:
    """Unpack into ``folder``, which is private to this process, and return the CompiledModel's folder in it.

    Raises StateError if the file is damaged or of another format. The engine then starts without it.
    """
    with _open_archive(blob) as archive:
        for name in archive.namelist():
            _write(folder, name, archive.read(name))  # checks its CRC
    return folder / _MODEL


def read_file(blob: bytes, name: str) -> bytes:
    """Read one of the packed files. Raises StateError."""
    with _open_archive(blob) as archive:
        return archive.read(f"{_MODEL}/{name}")


@contextmanager
def _open_archive(blob: bytes) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(io.BytesIO(blob)) as archive:
            yield archive
    except _DAMAGE_ERRORS as error:
        raise StateError(f"the compile cache cannot be read ({error}); materialize it again") from error


def cache_folders(folder: Path) -> dict[str, str]:
    """Return the environment variables that keep every cache of vLLM, Inductor and Triton in ``folder``."""
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
