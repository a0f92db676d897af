"""The keeper of the agent's regions, which fetches them on demand, checks them for changes, and drops them."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from ...container_limits import OutOfMemory, memory_available_bytes
from ...errors import MedusaError, NodeError, NodeRefusedError, StorageError, from_code
from ...process import ReportPipe
from ...storage.base import redacted, scheme_of
from ...timeline import Timeline
from ..callers.accounts import Accounts
from ..callers.impersonation import Folder
from ..callers.peer import Caller
from ..callers.policy import Policy
from ..child import REAPER, HungChildren, exit_status
from ..event_loop import EventLoop
from ..messages import receive, send
from ..settings import NodeSettings
from .fetching import assign_spare, close_in_child, fetch_settings, start_fetch, start_spare
from .model_key import open_folder
from .pool import RegionPool
from .records import RegionRecords
from .region_entry import RegionEntry
from .revalidation import Revalidation
from .spare import Spare, Spares

if TYPE_CHECKING:
    from .cluster_sources import ClusterAccess

logger = logging.getLogger(__name__)

_PIN_AGAIN_S = 10.0  # how often to try again to fetch pinned models
_SPARE_OF_FREE = 4  # pages that are allocated ahead of time may take one in this many free bytes
_LARGE_BYTES = 32 << 20  # to free less memory than this takes no longer than a fork


class RegionKeeper:
    """Starts and ends prefetchers, keeps pinned models, and takes back the regions of an earlier agent.

    ``pins`` are the keys of models to fetch at once and to keep. ``cluster`` is where prefetchers ask for peers that
    have a model. ``on_lost`` is called with a region whose fetch has failed, and the error, to inform its callers.
    """

    def __init__(
        self,
        settings: NodeSettings,
        policy: Policy,
        accounts: Accounts,
        *,
        pins: Iterable[str],
        on_lost: Callable[[RegionEntry, MedusaError], None],
        loop: EventLoop,
        timeline: Timeline,
        reports: ReportPipe,
        out_of_memory: OutOfMemory,
        cluster: ClusterAccess | None = None,
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._policy = policy
        self._accounts = accounts
        self._on_lost = on_lost
        self._loop = loop
        self._timeline = timeline
        self._reports = reports
        self._out_of_memory = out_of_memory
        self._pins = set(pins)
        self._pin_at = 0.0
        self._records = RegionRecords(settings.path + ".regions")
        self._revalidation = Revalidation(
            settings.look_every_s,
            self._on_change,
            policy=policy,
            timeline=timeline,
            reports=reports,
            loop=loop,
        )
        start = partial(
            start_spare, settings.ready_bytes, policy=policy, cluster=cluster, timeline=timeline, reports=reports
        )
        self._spares = Spares(start if settings.ready_bytes else None, self._has_room_for_spare, loop)
        self._hung = HungChildren()
        self._stopping = False
        self.regions = RegionPool(settings.memory_budget_bytes, policy, accounts, self._on_drop)
        self.replaced: Counter[str] = Counter()  # how many processes hung, by their kind
        self.fetches: Counter[str] = Counter(done=0, failed=0)  # how many ended, by how

    def tick(self) -> None:
        """Do the periodic work. Call it about twice a second."""
        self._end_hung()
        self._fetch_pinned()
        self._spares.tick(idle=all(entry.fetch is None for entry in self.regions))
        self._revalidation.tick(self.regions)
        REAPER.reap()

    def get_or_fetch(
        self,
        key: str,
        *,
        folder: Folder | None = None,
        fresh: bool = False,
        caller: Caller | None = None,
        layers: str | None = None,
        existing_only: bool = False,
    ) -> RegionEntry:
        """Return the region of a checkpoint. It is fetched if it is not there, if its files changed, or if ``fresh``.

        This does not wait: the region may be sealed only later. Functions that hold an old region keep that one.

        ``folder`` is that of a local checkpoint, as the caller has opened it. It is taken over. ``caller`` is charged
        for the fetch; None is the agent itself. ``layers`` (START:STOP) come first if the fetch begins now. With
        ``existing_only``, no fetch begins: NodeError is raised if there is no such region.
        """
        if folder is None and not scheme_of(key):
            folder = _open_own_folder(key)
        pinned = False
        try:
            # A region that was read with other rights is none: a caller does not learn what others have.
            slot = key if folder is None else folder.slot(key)
            entry = self.regions.get(slot)
            if entry is None and existing_only:
                raise NodeError("the node agent holds no such model, and fetches none")  # noqa: TRY301
            if caller is not None:
                self._check_models(slot, caller)
            if entry is not None and (fresh or not entry.is_current(folder)):
                logger.info("%s is fetched again: %s", redacted(key), "as asked" if fresh else "its files have changed")
                pinned = entry.pinned
                self.regions.drop(entry)
                entry = None
            if entry is not None:
                if caller is not None:
                    self.regions.check_share(entry, caller)
                if folder is not None:
                    os.close(folder.fd)
                return entry
            self._charge_fetch(caller)
            spare = self._spares.take() if folder is None else None
            entry = self._new_region(key, folder, spare, caller)
        except BaseException:
            if folder is not None:
                os.close(folder.fd)
            raise
        entry.layers = layers
        entry.pinned = pinned or (slot in self._pins and slot == key)
        self._start_fetch(entry, spare)
        return entry

    def _new_region(self, key: str, folder: Folder | None, spare: Spare | None, caller: Caller | None) -> RegionEntry:
        try:
            entry = RegionEntry(key, folder=folder, spare=spare)
        except BaseException:
            if caller is not None:
                self._accounts.refund(caller, "fetches")
                self._accounts.refund(caller, "prefetchers")
            raise
        entry.fetch_for = caller
        return entry

    def _start_fetch(self, entry: RegionEntry, spare: Spare | None) -> None:
        try:
            if spare is not None and assign_spare(spare, entry, self._settings.connections):
                entry.fetch = spare.child
            else:
                entry.fetch = start_fetch(
                    entry,
                    fetch_settings(entry.key, self._settings.connections, entry.layers),
                    policy=self._policy,
                    cluster=self._cluster,
                    timeline=self._timeline,
                    reports=self._reports,
                )
        except BaseException:
            self._uncharge_fetch(entry)()
            entry.close()
            raise
        self.regions.add(entry)
        self._loop.watch(entry.fetch.channel, partial(self._on_fetch, entry))
        logger.info("fetching %s", redacted(entry.key))

    @property
    def ready_bytes(self) -> int:
        """The memory that is allocated for the next model."""
        return self._spares.ready_bytes

    def _has_room_for_spare(self) -> bool:
        size_bytes = self._settings.ready_bytes
        free_bytes = self.regions.budget_bytes - self.regions.used_bytes
        return size_bytes <= free_bytes and size_bytes * _SPARE_OF_FREE <= memory_available_bytes()

    def _check_models(self, slot: str, caller: Caller) -> None:
        if caller.trusted:
            return
        used = {
            entry.slot for entry in self.regions for user in entry.leases.values() if user.account == caller.account
        } | {slot}
        if len(used) > (most := self._settings.per_caller.models):
            raise NodeRefusedError(
                f"{caller.account} uses {len(used) - 1} models of the node agent's already; expected at most {most} "
                f"(--per-caller models=…)"
            )

    def _charge_fetch(self, caller: Caller | None) -> None:
        """Charge a caller for one more fetch. If it has too many, drop its fetch that has been unused for longest.

        Its prefetchers are charged until they have ended, because one that waits for the caller's own file system
        cannot be killed.
        """
        if caller is None:
            return
        REAPER.reap()
        self._accounts.charge(caller, "prefetchers")
        try:
            self._charge_one_fetch(caller)
        except BaseException:
            self._accounts.refund(caller, "prefetchers")
            raise

    def _charge_one_fetch(self, caller: Caller) -> None:
        try:
            self._accounts.charge(caller, "fetches")
        except NodeRefusedError:
            left = [entry for entry in self.regions if entry.fetch is not None and not entry.in_use]
            left = [entry for entry in left if entry.fetch_for and entry.fetch_for.account == caller.account]
            if not left:
                raise
            self.regions.drop(min(left, key=lambda entry: entry.used_at))
            self._accounts.charge(caller, "fetches")

    def _uncharge_fetch(self, entry: RegionEntry) -> Callable[[], None]:
        """Take back what a fetch was charged. Call the result when its process has ended."""
        caller, entry.fetch_for = entry.fetch_for, None
        if caller is None:
            return lambda: None
        self._accounts.refund(caller, "fetches")
        return partial(self._accounts.refund, caller, "prefetchers")

    def take_back(self, key: str, descriptor: int, caller: Caller) -> RegionEntry:
        """Take back a region that an earlier agent made. Raises NodeError for any other region."""
        self._records.check(key, descriptor)
        self._check_models(key, caller)
        entry = self.regions.get(key)
        if entry is not None:
            return entry
        entry = RegionEntry(key, descriptor)
        try:
            entry.sealed = entry.complete
            _check_intact(entry)
            entry.leases[-1] = caller  # so that the caller is charged; its real lease comes later
            self.regions.admit(entry, os.fstat(descriptor).st_blocks * 512)
        except BaseException:
            entry.close()
            raise
        del entry.leases[-1]
        entry.pinned = key in self._pins
        self.regions.add(entry)
        self._record()
        logger.info("took back %s", redacted(key))
        return entry

    def unpin(self, entry: RegionEntry) -> None:
        entry.pinned = False
        self._pins.discard(entry.key)

    def _on_fetch(self, entry: RegionEntry) -> None:
        assert entry.fetch is not None
        try:
            message = receive(entry.fetch.channel)
        except (NodeError, OSError) as error:  # usually because there is no room for the files of the shards
            self._on_fetch_end(entry, NodeError(str(error)))
            return
        if message is None:
            self._on_fetch_end(entry)
        elif message.kind == "room":
            answer: tuple[str, dict[str, str]] = "room", {}
            wanted_bytes = int(message.body["bytes"])
            if self.regions.used_bytes + wanted_bytes + self._spares.size_bytes > self.regions.budget_bytes:
                self._spares.drop()
            try:
                self.regions.admit(entry, wanted_bytes)
            except MedusaError as error:
                logger.warning("%s", error)
                answer = "error", {"code": error.code, "message": str(error)}
            with suppress(OSError):  # the prefetcher has just died, and the end of its channel will be read next
                send(entry.fetch.channel, *answer)
        elif message.kind == "sealed":
            entry.sealed = True
            entry.files = message.descriptors
            entry.answer_waiting(None)
            self._record()  # after the answers, because it writes a file
        elif message.kind == "sources":
            entry.sources = message.body

    def _on_fetch_end(self, entry: RegionEntry, error: MedusaError | None = None) -> None:
        """Handle the end of a prefetcher, whether it succeeded or not. With ``error``, end it for that reason."""
        assert entry.fetch is not None
        progress = entry.region.progress()
        is_complete = progress.state == "done" and error is None
        status = None if error or is_complete else exit_status(entry.fetch)
        self._end_fetch(entry)
        if is_complete:
            self.fetches["done"] += 1
            self._record()
            logger.info("%s is complete", redacted(entry.key))
            return
        how = "" if status is None else f" ({self._out_of_memory.how(status)})"
        self.fetches["failed"] += 1
        error = error or StorageError(f"its prefetcher ended early{how}")
        if progress.error is not None:
            code, _, message = progress.error.partition(": ")
            error = from_code(code, message)
        logger.warning("%s could not be fetched: %s", redacted(entry.key), error)
        entry.answer_waiting(error)
        self._on_lost(entry, error)
        self.regions.drop(entry)

    def _end_fetch(self, entry: RegionEntry) -> None:
        assert entry.fetch is not None
        self._loop.unwatch(entry.fetch.channel)
        REAPER.kill(entry.fetch, self._uncharge_fetch(entry))
        entry.fetch = None

    def _on_drop(self, entry: RegionEntry) -> None:
        if entry.fetch is not None:
            self._end_fetch(entry)
            error = NodeError("the node agent has given this fetch up")
            entry.answer_waiting(error)
            if not entry.complete:  # else its process was about to end, and functions keep what they have
                self._on_lost(entry, error)
        self._close_entry(entry)
        self._record()

    def _close_entry(self, entry: RegionEntry) -> None:
        if (entry.size_bytes >= _LARGE_BYTES or entry.files) and not self._stopping:
            try:
                pid = close_in_child(entry, timeline=self._timeline, reports=self._reports)
            except MedusaError as error:
                logger.debug("%s", error)
            else:
                REAPER.add(pid)
                logger.debug("process %d takes back the memory of %s", pid, redacted(entry.key))
                return
        entry.close()

    def _on_change(self, entry: RegionEntry) -> None:
        """Drop a region whose objects were replaced. A pinned model is fetched again at once, another on request."""
        if self.regions.get(entry.key) is not entry:
            return
        if not entry.pinned:
            self.regions.drop(entry)
            return
        try:
            self.get_or_fetch(entry.key, fresh=True)
        except MedusaError as error:
            logger.warning("%s", error)

    def _fetch_pinned(self) -> None:
        """Fetch the pinned models that are missing, for example because their store did not answer before."""
        if time.monotonic() < self._pin_at:
            return
        self._pin_at = time.monotonic() + _PIN_AGAIN_S
        for key in self._pins:
            try:
                self.get_or_fetch(key)
            except MedusaError as error:
                logger.warning("--pin: %s", error)

    def _end_hung(self) -> None:
        """Kill prefetchers that hang. Their end is then handled like any other."""
        fetching = {entry.fetch.pid: entry for entry in self.regions if entry.fetch is not None}
        for pid, reason in self._hung.find_hung({pid: entry.beat_ns for pid, entry in fetching.items()}).items():
            logger.warning("the prefetcher of %s hangs: %s; killing it", redacted(fetching[pid].key), reason)
            self.replaced["prefetcher"] += 1
            os.kill(pid, signal.SIGKILL)

    def _record(self) -> None:
        # Regions of files that were read with a caller's rights are left out. They are only for that caller, and to
        # make one again takes no longer than to bring it back.
        kept = [entry for entry in self.regions if entry.sealed and entry.slot == entry.key]
        self._records.write({entry.key: entry.region.fd for entry in kept})

    def close(self) -> None:
        """Let go of all regions, and end all fetches."""
        self._stopping = True
        self._spares.drop()
        self._revalidation.close()
        self._records.freeze()  # callers that hold a region may bring it to the next agent
        self.regions.close()
        REAPER.wait()


def _check_intact(entry: RegionEntry) -> None:
    if not entry.complete or not entry.is_current():
        raise NodeError(f"the region of {redacted(entry.key)} is not complete, or its files have changed")


def _open_own_folder(key: str) -> Folder:
    fd = open_folder(key)
    if fd is None:
        raise NodeError(f"{key}: expected a folder, or a file in one, that user {os.geteuid()} may read")
    return Folder(fd)


__all__ = ["RegionKeeper"]
