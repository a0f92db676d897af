"""One region that the agent holds, and the prefetcher that fills it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from ...errors import MedusaError
from ...region.demand import demand_memory, promote
from ...region.layout import reopen
from ...region.reader import Region
from ...storage.base import redacted
from ...storage.local import file_version
from ..child import Child
from ..messages import close_all


class HeldRegion:
    """A region, who uses it, and what it is for. ``size_bytes``: the memory it was admitted with, 0 before that."""

    def __init__(self, key: str, region: Region | None = None) -> None:
        self.key = key
        self.region = region or Region.create()
        if region is None:
            os.fchmod(self.region.fd, 0o644)  # others can open it for reading alone, also before it is sealed
        self.demand_fd = demand_memory()
        self.size_bytes = 0
        self.sealed = False  # whether it can be handed out
        self.pinned = False
        self.leases: set[int] = set()  # descriptors of the connections that use it
        self.waiting: list[Callable[[MedusaError | None], None]] = []  # told when it is sealed, or what went wrong
        self.used_at = self.looked_at = time.monotonic()
        self.fetch: Child | None = None
        self.handed = 0

    @property
    def in_use(self) -> bool:
        return bool(self.leases) or self.pinned or bool(self.waiting)

    @property
    def complete(self) -> bool:
        return self.region.progress().state == "done"

    def descriptors(self) -> list[int]:
        """To send: the region under a description that can only be read, and where to ask. Close them afterwards."""
        return [reopen(self.region.fd, os.O_RDONLY), os.dup(self.demand_fd)]

    def promote(self) -> None:
        """A function waits for it; until one does, it is fetched in the background."""
        promote(self.demand_fd)

    def is_current(self) -> bool:
        """Whether the local files it names are still those that were indexed; true of objects in a store."""
        for shard in self.region.wait_index().shards if self.sealed else ():
            if shard.path is not None:
                try:
                    if file_version(os.stat(shard.path)) != shard.version:
                        return False
                except OSError:
                    return False
        return True

    def status(self) -> dict[str, object]:
        progress = self.region.progress()
        return {
            "url": redacted(self.key),
            "state": progress.state,
            "fetched_bytes": progress.fetched_bytes,
            "total_bytes": progress.total_bytes,
            "memory_bytes": self.size_bytes,
            "in_use_by": len(self.leases),
            "handed_out": self.handed,
            "pinned": self.pinned,
            "idle_s": 0 if self.leases else round(time.monotonic() - self.used_at, 1),
        }

    def close(self) -> None:
        self.region.close()
        close_all([self.demand_fd])
