"""Checksums of a checkpoint's chunks, as a state bundle records them."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence

from ..errors import ConfigError

logger = logging.getLogger(__name__)

Checksum = Callable[[memoryview], int]

# Fastest first; each entry is a package's module and function (docs: 16 to 31 GB/s a core).
_IMPLEMENTATIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "xxh3_64": (("xxhash", "xxh3_64_intdigest"),),
    "crc32c": (("awscrt.checksums", "crc32c"), ("crc32c", "crc32c"), ("google_crc32c", "value")),
    "crc32": (("zlib", "crc32"),),  # 4 GB/s, but always there
}
ALGORITHMS = tuple(_IMPLEMENTATIONS)


def checksum_function(algorithm: str) -> Checksum | None:
    """Return the algorithm's function; None when no package with it is installed. ConfigError for an unknown name."""
    if algorithm not in _IMPLEMENTATIONS:
        raise ConfigError(f"unknown checksum {algorithm!r}; expected one of {', '.join(_IMPLEMENTATIONS)}")
    for module, name in _IMPLEMENTATIONS[algorithm]:
        try:
            found: Checksum = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError):
            continue
        return found
    return None


class Checksums:
    """One value for each chunk of ``chunk_bytes``, numbered as ``Chunks`` does.

    ``pinned``: they were computed from the very version that the store serves, so a mismatch means damage. Otherwise a
    chunk that mismatches twice means that the values belong to other weights.
    """

    def __init__(self, algorithm: str, chunk_bytes: int, values: Sequence[int], *, pinned: bool = True) -> None:
        self.pinned = pinned
        self.algorithm = algorithm
        self.chunk_bytes = chunk_bytes
        self.values = values
        self._function = checksum_function(algorithm)
        if self._function is None:
            packages = " or ".join(module.partition(".")[0] for module, _ in _IMPLEMENTATIONS[algorithm])
            logger.warning("checksums are not verified: pip install %s", packages)

    def fits(self, chunk_bytes: int, count: int) -> bool:
        """Return whether these are the checksums of a region of ``count`` chunks of ``chunk_bytes``."""
        return self.chunk_bytes == chunk_bytes and len(self.values) == count

    def right(self, chunk: int, data: memoryview) -> bool:
        """Return whether a chunk's checksum is right; true also when nothing here can compute the algorithm."""
        return self._function is None or self._function(data) == self.values[chunk]
