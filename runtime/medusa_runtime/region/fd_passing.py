"""Hand a region over to another process: its descriptors, and the checks before its bytes are read there."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..errors import RequestError
from .reader import Region
from .seals import SEAL_SHRINK, seals_of


def descriptors_to_pass(region: Region) -> list[int]:
    """Return new descriptors of a region, and of its shards that are local files, for ``region_from_descriptors``.

    Waits for the region's index. The files are opened with the rights of this process, not of the one that gets them.
    Raises the error of a fetch that has failed, and OSError for a file that cannot be opened.
    """
    index = region.wait_index()
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


def region_from_descriptors(descriptors: Sequence[int]) -> Region:
    """Return a region that takes over these descriptors. If this function raises, they still belong to the caller.

    Paths in the index are never opened, since this process may have other rights than the one that wrote them. Raises
    RequestError for a region whose size can change, and for one without the files of its local shards.
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


__all__ = ["descriptors_to_pass", "region_from_descriptors"]
