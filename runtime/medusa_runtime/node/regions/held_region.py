"""One region that the agent holds, and the prefetcher that fills it."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...errors import MedusaError
from ...liveness import Heartbeats
from ...region.demand import demand_memory, promote
from ...region.layout import HEADER_BYTES, reopen
from ...region.reader import Region
from ...storage.base import redacted, scheme_of
from ...storage.local import file_version
from ..callers.impersonation import Folder
from ..callers.peer import Caller
from ..child import Child, cannot
from ..messages import close_all

if TYPE_CHECKING:
    from .spare import Spare

_SOURCES = ("received_bytes", "excluded")
LEAST_BYTES = 2 * HEADER_BYTES  # the header of an empty region, and the page of its readers' requests


def open_region(fd: int | None = None) -> tuple[Region, int]:
    """Make an empty region, or open again the one that ``fd`` is. Also returns the page of its readers' requests.

    Others can open an empty one for reading alone, also before it is sealed. Raises LimitError or NodeError.
    """
    opened = []
    try:
        opened.append(demand_memory())
        if fd is not None:
            return Region(os.dup(fd)), opened[0]
        region = Region.create()
        os.fchmod(region.fd, 0o644)
        return region, opened[0]
    except OSError as error:
        close_all(opened)
        raise cannot("make a region", error) from None


class HeldRegion:
    """A region, who uses it, and what it is for. ``size_bytes``: the memory it takes.

    ``slot`` names it among the agent's regions; ``folder`` is a local checkpoint's, which this object closes.
    ``fd``: of a region that exists already. ``spare``: one that was made ahead of time, with its prefetcher.
    Raises LimitError or NodeError when none can be made.
    """

    def __init__(
        self, key: str, fd: int | None = None, folder: Folder | None = None, spare: Spare | None = None
    ) -> None:
        self.key = key
        self.slot = key if folder is None else folder.slot(key)
        self.folder = folder
        self.region, self.demand_fd = (spare.region, spare.demand_fd) if spare else open_region(fd)
        self.shard_fds: list[int] = []  # the files of a local checkpoint's shards, as its index was read from them
        self.size_bytes = LEAST_BYTES
        self.sealed = False  # whether it can be handed out
        self.pinned = False
        self.leases: dict[int, Caller] = {}  # who uses it, by the descriptors of their connections
        # Those of them who wait for it: what is called when it is sealed, or has failed.
        self.waiting: dict[int, Callable[[MedusaError | None], None]] = {}
        self.used_at = self.looked_at = time.monotonic()
        self.fetch: Child | None = None
        self.heartbeats = spare.heartbeats if spare else Heartbeats()  # of the prefetcher
        self.fetch_for: Caller | None = None  # who is charged for the fetch
        self.layers: str | None = None  # which are fetched first
        self.handed = 0
        self.sources: dict[str, Any] = {}  # where its bytes came from, in a cluster
        self._version = ""

    @property
    def in_use(self) -> bool:
        return bool(self.leases) or self.pinned

    @property
    def complete(self) -> bool:
        return self.region.progress().state == "done"

    @property
    def version(self) -> str:
        """The same text for the same objects of a store; "" for local files, and before the index is there."""
        if not self._version and self.sealed and self.folder is None and scheme_of(self.key):
            shards = [(shard.name, shard.size_bytes, shard.version) for shard in self.region.wait_index(1.0).shards]
            self._version = hashlib.blake2b(repr(sorted(shards)).encode(), digest_size=8).hexdigest()
        return self._version

    @property
    def payer(self) -> Caller | None:
        """The caller who is charged for its memory: the first of its users. A pinned model is the agent's own."""
        return None if self.pinned else next(iter(self.leases.values()), None)

    def beat_ns(self) -> int:
        """Return the time of the prefetcher's last heartbeat."""
        return self.heartbeats.beat_ns("prefetcher")

    def announce(self, error: MedusaError | None) -> None:
        """Answer those who wait for it: it can be handed out, or has failed."""
        waiting, self.waiting = self.waiting, {}
        for answer in waiting.values():
            answer(error)

    def descriptors(self) -> list[int]:
        """Return what is sent to a reader: the region, for reading only, and the page of its requests. Close both.

        Raises LimitError or NodeError when they cannot be opened.
        """
        opened: list[int] = []
        try:
            opened.append(reopen(self.region.fd, os.O_RDONLY))
            opened.append(os.dup(self.demand_fd))
        except OSError as error:
            close_all(opened)
            raise cannot("open a region for a function", error) from None
        return opened

    def promote(self) -> None:
        """Fetch it before others, because a function waits for it; until then it is fetched in the background."""
        promote(self.demand_fd)

    def is_current(self, folder: Folder | None = None) -> bool:
        """Return whether the local files that it names are still those that were indexed; true of objects in a store.

        ``folder``: what a caller has sent as this checkpoint's folder.
        """
        if self.folder is None and scheme_of(self.key):
            return True
        ours = self.folder
        try:
            if folder is not None and ours is not None and not os.path.sameopenfile(folder.fd, ours.fd):
                return False
            for shard in self.region.wait_index(1.0).shards if self.sealed else ():
                if shard.path is not None:
                    found = os.stat(shard.path) if ours is None else os.stat(shard.name, dir_fd=ours.fd)
                    if file_version(found) != shard.version:
                        return False
        except (OSError, MedusaError):  # TimeoutError is an OSError
            return False
        return True

    def status(self) -> dict[str, object]:
        progress = self.region.progress()
        payer = self.payer
        return {
            "url": redacted(self.key),
            "state": progress.state,
            "fetched_bytes": progress.fetched_bytes,
            "total_bytes": progress.total_bytes,
            "memory_bytes": self.size_bytes,
            "in_use_by": len(self.leases),
            "charged_to": payer.account if payer else None,
            "handed_out": self.handed,
            "pinned": self.pinned,
            "version": self.version,
            **({"sources": {name: self.sources.get(name) for name in _SOURCES}} if self.sources else {}),
            "idle_s": 0 if self.leases else round(time.monotonic() - self.used_at, 1),
        }

    def close(self) -> None:
        self.region.close()
        close_all([self.demand_fd, *self.shard_fds, *([self.folder.fd] if self.folder else [])])
        self.shard_fds.clear()
