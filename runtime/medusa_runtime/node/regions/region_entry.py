"""A region that the agent holds, and the prefetcher that fills it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from ...checkpoint.index import version_of
from ...errors import CorruptError, MedusaError
from ...liveness import Heartbeats
from ...region.demand import create_demand_memfd, promote
from ...region.layout import HEADER_BYTES, reopen
from ...region.reader import Region
from ...storage.base import redacted, scheme_of
from ...storage.local import file_version
from ..callers.file_status import PATIENCE, file_status
from ..callers.impersonation import Folder
from ..callers.peer import Caller
from ..child import Child, as_node_error
from ..messages import close_without_linger

if TYPE_CHECKING:
    from .spare import Spare

_SOURCES = ("received_bytes", "excluded")
LEAST_BYTES = 2 * HEADER_BYTES  # the header of an empty region, and the page for its readers' requests


def open_region(fd: int | None = None) -> tuple[Region, int]:
    """Make an empty region, or open again the one of ``fd``. Return it and the memfd for its readers' requests.

    Other users can open an empty region only for reading, even before it is sealed. Raises LimitError or NodeError.
    """
    with ExitStack() as opened:
        try:
            demand_fd = create_demand_memfd()
            opened.callback(os.close, demand_fd)
            region = Region.create() if fd is None else Region(os.dup(fd))
            opened.callback(region.close)
            if fd is None:
                os.fchmod(region.fd, 0o644)
            region.progress()  # maps the header, for which there may be no room when the fetch ends
        except OSError as error:
            raise as_node_error("make a region", error) from None
        opened.pop_all()
        return region, demand_fd


class RegionEntry:
    """A region, its checkpoint (``key``), and the callers that use it.

    ``slot`` is its unique name among the agent's regions, and ``size_bytes`` the memory that it takes. ``folder`` is
    that of a local checkpoint; this object closes it. ``fd`` is given for a region that already exists, and ``spare``
    for one that was made ahead of time, with its prefetcher. Raises LimitError or NodeError if no region can be made.
    """

    def __init__(
        self, key: str, fd: int | None = None, folder: Folder | None = None, spare: Spare | None = None
    ) -> None:
        self.key = key
        self.slot = key if folder is None else folder.slot(key)
        self.folder = folder
        self.region, self.demand_fd = (spare.region, spare.demand_fd) if spare else open_region(fd)
        self.files: list[int] = []  # a socket that holds a local checkpoint's files, as its index was read from them
        self.size_bytes = LEAST_BYTES
        self.sealed = False  # whether it can be handed out
        self.pinned = False
        self.leases: dict[int, Caller] = {}  # the callers that use it, by the descriptors of their connections
        # By the same descriptors, for callers that wait, what to call when the region is sealed, or has failed.
        self.waiting: dict[int, Callable[[MedusaError | None], None]] = {}
        self.used_at = self.checked_at = time.monotonic()
        self.fetch: Child | None = None
        self.heartbeats = spare.heartbeats if spare else Heartbeats()  # of the prefetcher
        self.fetch_for: Caller | None = None  # the caller that is charged for the fetch
        self.layers: str | None = None  # the layers that are fetched first, START:STOP
        self.handouts = 0
        self.sources: dict[str, Any] = {}  # where its bytes came from, in a cluster
        self._version = ""
        self._readers_fd = -1  # the read-only region that readers get a duplicate of

    @property
    def in_use(self) -> bool:
        return bool(self.leases) or self.pinned

    @property
    def complete(self) -> bool:
        return self.region.progress().state == "done"

    @property
    def version(self) -> str:
        """A digest of the versions of a store's objects; "" for local files, and before the index is there."""
        if not self._version and self.sealed and self.folder is None and scheme_of(self.key):
            with suppress(CorruptError, OSError):  # more shards than the agent reads
                self._version = version_of(self.region.shards())
        return self._version

    @property
    def payer(self) -> Caller | None:
        """The caller that is charged for the memory: the first user. None if it is pinned, or has no user."""
        return None if self.pinned else next(iter(self.leases.values()), None)

    def beat_ns(self) -> int:
        """Return the time of the prefetcher's last heartbeat."""
        return self.heartbeats.beat_ns("prefetcher")

    def answer_waiting(self, error: MedusaError | None) -> None:
        """Answer all waiting callers: the region can be handed out or, with an error, has failed."""
        waiting, self.waiting = self.waiting, {}
        for answer in waiting.values():
            answer(error)

    def descriptors(self) -> list[int]:
        """Return the descriptors to send to a reader: the read-only region, and the memfd for its requests.

        The caller closes both. Raises LimitError or NodeError if they cannot be opened.
        """
        opened: list[int] = []
        try:
            if self._readers_fd < 0:  # opened once: a reader that is root in a container can change the memfd's mode
                self._readers_fd = reopen(self.region.fd, os.O_RDONLY)
            opened.append(os.dup(self._readers_fd))
            opened.append(os.dup(self.demand_fd))
        except OSError as error:
            close_without_linger(opened)
            raise as_node_error("open a region for a function", error) from None
        return opened

    def promote(self) -> None:
        """Fetch the region as an interactive load, because a function waits for it. Before, it is a background load."""
        promote(self.demand_fd)

    def is_current(self, folder: Folder | None = None) -> bool:
        """Return whether the region's local files are still those that were indexed; True for objects in a store.

        ``folder`` is what a caller has now sent as this checkpoint's folder.
        """
        if self.folder is None and scheme_of(self.key):
            return True
        ours = self.folder
        try:
            if folder is not None and ours is not None and file_status(folder.fd) != file_status(ours.fd):
                return False
        except MedusaError:
            return False
        if not self.sealed or ours is None or ours.identity is None:
            return self._are_files_current()
        # A caller's file system that is too slow counts as changed: a child reads the files again, and may wait. So do
        # files of which there are too many.
        return PATIENCE.ask(ours.identity.uid, self._are_files_current) is True

    def _are_files_current(self) -> bool:
        """Return whether local files are those that were indexed. This asks their file system."""
        try:
            for shard in self.region.shards() if self.sealed else ():
                if shard.path is None:
                    continue
                found = os.stat(shard.path) if self.folder is None else os.stat(shard.name, dir_fd=self.folder.fd)
                if file_version(found) != shard.version:
                    return False
        except (OSError, MedusaError):
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
            "retries_total": progress.retries,
            "memory_bytes": self.size_bytes,
            "in_use_by": len(self.leases),
            "charged_to": payer.account if payer else None,
            "handed_out": self.handouts,
            "pinned": self.pinned,
            "version": self.version,
            **({"sources": {name: self.sources.get(name) for name in _SOURCES}} if self.sources else {}),
            "idle_s": 0 if self.leases else round(time.monotonic() - self.used_at, 1),
        }

    def close(self) -> None:
        self.region.close()
        if self._readers_fd >= 0:
            os.close(self._readers_fd)
        close_without_linger([self.demand_fd, *self.files, *([self.folder.fd] if self.folder else [])])
        self.files.clear()
