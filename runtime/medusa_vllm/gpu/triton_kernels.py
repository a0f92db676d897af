"""The Triton kernels that a start of vLLM compiles, as an artifact of the state bundle.

vLLM compiles them in its warm-up, which takes half a minute where Triton's cache on disk is empty: in every new
container. Triton finds a kernel in the cache by a hash of its source, the options, the GPU's type and Triton itself, so
a kernel of another version is not found, and compiled. Only a group's paths have to be written anew.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from medusa_runtime.engine.gpu.preimport import read_triton_key
from medusa_runtime.errors import StateError
from medusa_runtime.region.reader import Region
from medusa_runtime.state.kinds import file_name

from medusa_vllm import TRITON_KERNELS

from ..archive import Archive
from ..scratch import scratch_folder

logger = logging.getLogger(__name__)

_ARCHIVE = Archive("the artifact with Triton's kernels", "triton-1")
_CACHE = "TRITON_CACHE_DIR"
_KEPT = (".json", ".cubin", ".so")  # the others are intermediate code, which nothing reads unless somebody debugs
_GROUP, _MEMBERS = "__grp__", "child_paths"  # a group's file, and what in it names the paths of its members


_MADE_FOR = "made-for"  # the file of an archive that says for which start its kernels are all that is needed
# Read when this module is imported, by the process that forks engines: Inductor may set the variable later.
_NAMED = os.environ.get(_CACHE)


def purpose(config: Any, flags: str | None) -> str:
    """Return what decides, for one model and GPU, which kernels a start needs: of its VllmConfig, and vLLM's flags."""
    return f"{config.compilation_config.mode!s} {flags or ''}".strip()


def pack(folder: Path, blob: Path, made_for: str = "") -> int:
    """Write the kernels that Triton has kept in ``folder`` to the file ``blob``, and return how many these are.

    ``made_for`` is the ``purpose`` of the start that compiled them. Without any kernels, nothing is written.
    """
    made = blob.with_name(f"{blob.name}-made")
    count = 0
    for path in sorted(folder.glob("*/*")):
        if path.suffix not in _KEPT or not path.is_file():
            continue
        target = made / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.name.startswith(_GROUP):
            members = [name for name in json.loads(path.read_text())[_MEMBERS] if Path(name).suffix in _KEPT]
            target.write_text(json.dumps({_MEMBERS: dict.fromkeys(members, "")}))
        else:
            shutil.copyfile(path, target)
        count += path.suffix == ".cubin"
    if count:
        (made / _MADE_FOR).write_text(made_for)
        _ARCHIVE.pack(made, blob)
    return count


def unpack(blob: bytes, folder: Path) -> Path:
    """Unpack into ``folder``, which is private to this process, and return the folder to use as Triton's cache.

    Raises StateError if the blob is damaged.
    """
    cache = _ARCHIVE.unpack(blob, folder)
    for path in cache.glob(f"*/{_GROUP}*"):
        try:
            names = [str(name) for name in json.loads(path.read_text())[_MEMBERS]]
            members = {name: str(path.with_name(Path(name).name)) for name in names}
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f"{_ARCHIVE.what} has a damaged group ({error}); materialize it again") from error
        path.write_text(json.dumps({_MEMBERS: members}))
    return cache


@contextmanager
def key_read_beside() -> Iterator[None]:
    """Let Triton read its own files in a thread during this context, which may import anything, but not fork.

    No thread is left.
    """
    thread = threading.Thread(target=read_triton_key, name="triton-key")
    thread.start()
    try:
        yield
    finally:
        thread.join()


@contextmanager
def restored(region: Region) -> Iterator[str | None]:
    """Let Triton find the state bundle's kernels in this context, and return the ``purpose`` that they were made for.

    None if there are none, or they cannot be used. Triton's cache is then a temporary folder, so a folder that the user
    has named stays in use.
    """
    made_for: str | None = None
    with ExitStack() as held:
        if region.has_code(file_name(TRITON_KERNELS.name)):
            if _NAMED is not None:
                logger.info("the state bundle's Triton kernels are not used: %s is %s", _CACHE, _NAMED)
            elif (blob := region.code(file_name(TRITON_KERNELS.name))) is not None:
                try:
                    folder = held.enter_context(scratch_folder("medusa-triton"))
                    _require_code_from(folder)
                    cache = unpack(blob, folder)
                    made_for = _read_purpose(cache)
                    held.enter_context(patch.dict(os.environ, {_CACHE: str(cache)}))
                except (StateError, OSError) as error:
                    logger.warning("Triton's kernels are compiled and not restored: %s", error)
        yield made_for


def _read_purpose(cache: Path) -> str:
    try:
        return (cache / _MADE_FOR).read_text()
    except (OSError, ValueError) as error:
        raise StateError(f"{_ARCHIVE.what} does not say what it is for ({error}); materialize it again") from error


def _require_code_from(folder: Path) -> None:
    """Raise StateError if no code can be mapped from this folder.

    Triton maps its launchers. One that it cannot map it compiles and puts into the same folder, and then it fails.
    """
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise StateError(f"{folder.parent} is mounted without the right to run code; set TMPDIR to another folder")


__all__ = ["key_read_beside", "pack", "purpose", "restored", "unpack"]
