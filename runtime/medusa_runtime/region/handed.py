"""A region that another process hands over: its descriptors, and what must hold before its bytes are read."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..errors import RequestError
from .reader import Region
from .seals import SEAL_SHRINK, seals_of


def descriptors_of(region: Region, timeout_s: float | None = None) -> list[int]:
    """Return new descriptors of a region and of the local files that its shards are, for ``open_handed``.

    Waits for its index. The files are opened with the rights of this process, not of the one that they are for. Raises
    what the fetch has failed with, and OSError for a file that cannot be opened.
    """
    index = region.wait_index(timeout_s)
    found = [os.dup(region.fd)]
    try:
        for shard in index.shards:
            if shard.path is not None:
                found.append(os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC))
    except BaseException:
        for descriptor in found:
            os.close(descriptor)
        raise
    return found


def open_handed(descriptors: Sequence[int]) -> Region:
    """Return the region of these descriptors, which it takes over; if that raises, they are still the caller's.

    A path in its index is never opened: this process may have other rights than the one that wrote it. RequestError for
    a region whose size can change, and for one without the files of its local shards.
    """
    try:
        sealed = bool(seals_of(descriptors[0]) & SEAL_SHRINK)
    except OSError:
        sealed = False
    if not sealed:
        raise RequestError("expected a region whose size is sealed, found another file")
    region = Region(os.dup(descriptors[0]))
    try:
        local = [shard.path is not None for shard in region.wait_index(0.0).shards]
    except TimeoutError:
        raise RequestError("expected a region with its index, found an empty one") from None
    finally:
        region.close()
    if any(local) and len(descriptors) != 1 + len(local):
        raise RequestError(f"expected {len(local)} files with the region, found {len(descriptors) - 1}")
    return Region(descriptors[0], shard_fds=tuple(descriptors[1:]))


__all__ = ["descriptors_of", "open_handed"]
