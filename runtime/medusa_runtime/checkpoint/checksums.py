"""The checksums of a checkpoint's chunks that a state bundle records."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence

from ..errors import ConfigError

logger = logging.getLogger(__name__)

Checksum = Callable[[memoryview], int]

# By algorithm, the modules and functions that compute it, in order of preference. The algorithms are sorted by speed;
# the first two reach 16 to 31 GB/s on one core.
_IMPLEMENTATIONS: dict[str, tuple[tuple[str, str], ...]] = {
    "xxh3_64": (("xxhash", "xxh3_64_intdigest"),),
    "crc32c": (("awscrt.checksums", "crc32c"), ("crc32c", "crc32c"), ("google_crc32c", "value")),
    "crc32": (("zlib", "crc32"),),  # 4 GB/s, but always installed
}
ALGORITHMS = tuple(_IMPLEMENTATIONS)


def checksum_function(algorithm: str) -> Checksum | None:
    """Return the algorithm's function; None if no package with it is installed. ConfigError for an unknown name."""
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
    """The checksum of each chunk of ``chunk_bytes``, in the order in which ``Chunks`` numbers them.

    ``pinned`` checksums were computed from the same version of the files that the store serves, so a mismatch means
    damage. Otherwise, a chunk that mismatches twice means that the checksums belong to other weights.
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

    def matches(self, chunk: int, data: memoryview) -> bool:
        """Return whether a chunk's checksum is right. If no installed package computes it, all chunks are right."""
        return self._function is None or self._function(data) == self.values[chunk]
