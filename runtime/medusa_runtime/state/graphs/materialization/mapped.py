"""Kernel images in the libraries that this process has mapped."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection
from pathlib import Path

from ....errors import MedusaError
from ..blueprint import LibraryImage
from .fatbin import library_fatbins, unpack

logger = logging.getLogger(__name__)


def mapped_libraries() -> dict[str, Path]:
    """File name → path of the shared libraries in this process."""
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line[line.find("/") :] if "/" in line else ""
        if ".so" in path.rpartition("/")[2]:
            found[Path(path).name] = Path(path)
    return found


def locate(digests: Collection[str], libraries: Collection[Path], arch: int) -> dict[str, LibraryImage]:
    """Offline: which library holds which of these cubins (by sha256), and where."""
    found: dict[str, LibraryImage] = {}
    for path in libraries:
        try:
            for data, fatbin in library_fatbins(path):
                for entry in fatbin.entries:
                    if not entry.cubin or entry.arch != arch:
                        continue
                    digest = hashlib.sha256(unpack(data, entry)).hexdigest()
                    if digest in digests and digest not in found:
                        whole = bytes(data[fatbin.start : fatbin.start + fatbin.size])
                        place = fatbin.start, fatbin.size, hashlib.sha256(whole).hexdigest()
                        found[digest] = LibraryImage(path.name, *place)
        except (MedusaError, OSError) as error:
            logger.info("%s was not searched for kernels: %s", path.name, error)
    return found


def read_image(place: LibraryImage) -> bytes | None:
    """Online: the fat binary, if the library is mapped and still holds it there."""
    path = mapped_libraries().get(place.library)
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            file.seek(place.start)
            data = file.read(place.size)
    except OSError:
        return None
    return data if hashlib.sha256(data).hexdigest() == place.digest else None
