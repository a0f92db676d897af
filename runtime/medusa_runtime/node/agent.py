"""The node agent: hands out regions and pre-warmed engine processes over its socket.

One thread and one loop, because it forks. Nothing in it waits: what takes time is a child's work.

    function ─region▶ agent ─fork▶ prefetcher     storage ─fetch▶ region, handed out read-only to any number
             ─engine▶ agent ─fork▶ zygote ─fork▶ idle engine ◀─ the function's socket, region, settings

A lease is a connection: the kernel closes it when the function dies, in whatever way.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ..config import Settings
from ..device.choice import obstacle
from ..errors import ConfigError, MedusaError, NodeError, NodeRefusedError, StorageError, from_code
from ..process import ReportPipe, share_cores
from ..region.reader import Region
from ..resource_limits import make_room_for_files
from ..storage.base import redacted, scheme_of
from ..timeline import Timeline
from .accounts import Accounts
from .asker import Folder
from .child import Stopped, end_child
from .clients import Client, Clients
from .engines.pool import EnginePool
from .messages import MOST_OF_OURS, receive, send
from .peer import Caller
from .policy import Policy
from .regions.fetching import give_back, start_fetch
from .regions.held_region import HeldRegion
from .regions.model_key import absolute, model_key, open_folder
from .regions.pool import RegionPool
from .regions.records import Records
from .regions.revalidation import Revalidation
from .settings import NodeSettings
from .socket_file import SocketFile
from .watchdog import Watchdog

logger = logging.getLogger(__name__)

_TICK_S = 0.5
_PIN_AGAIN_S = 10.0  # after a store did not give what is pinned
_MUCH_BYTES = 32 << 20  # of memory; less is taken back in the time that a fork takes


class Agent:
    """Owns everything; ``run`` serves until SIGTERM or SIGINT."""

    def __init__(self, settings: NodeSettings) -> None:
        """Listen. Raises ConfigError when another agent serves this socket, or it cannot be had.

        LimitError when too few files may be open; each function is one.
        """
        make_room_for_files()
        if settings.gpu_context and (missing := obstacle(os.environ)):
            raise ConfigError(f"--gpu-context yes cannot be had: {missing}; or leave it out")
        self._pins = {model_key(absolute(url)) for url in settings.pin}
        self.settings = settings
        self.policy = Policy(settings.allow, settings.quota)
        self._doors = _listen(settings)
        budget_bytes = settings.budget_bytes()
        self.accounts = Accounts(settings.per_caller, budget_bytes)
        self.regions = RegionPool(budget_bytes, self.policy, self.accounts, self._dropped)
        self.replaced: Counter[str] = Counter()  # processes that hung, by what they were
        self._stopped = Stopped()
        self._records = Records(settings.path + ".regions")
        self._timeline = Timeline.create("node")
        self._reports = ReportPipe()
        self._selector = selectors.DefaultSelector()
        self._stop = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._stopping = False
        self.engines = EnginePool(
            settings.prewarm,
            gpu_context=settings.gpu_context,
            torch_import=settings.torch_import,
            timeline=self._timeline,
            reports=self._reports,
            watch=self.watch,
            unwatch=self.unwatch,
        )
        self._revalidation = Revalidation(
            settings.look_every_s,
            self._changed,
            timeline=self._timeline,
            reports=self._reports,
            watch=self.watch,
            unwatch=self.unwatch,
        )
        self._clients = Clients(self)
        self._watchdog = Watchdog()
        self._pin_at = 0.0
        self._ending: list[int] = []  # children that give memory back, for as long as that takes
        self.started_at = time.monotonic()

    def run(self) -> int:
        share_cores()
        signal.set_wakeup_fd(self._stop[1], warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_stop)
        try:
            for door in self._doors:
                self.watch(door.socket, partial(self._clients.accept, door))
            self._selector.register(self._stop[0], selectors.EVENT_READ, self._drain)
            self._selector.register(self._reports.read_fd, selectors.EVENT_READ, self._read_reports)
            self._watchdog.start()
            while not self._stopping:
                self._watchdog.beat()
                self._end_stopped()
                self.engines.tick()
                self._clients.tick()
                self._fetch_pinned()
                self._revalidation.tick(self.regions)
                self._ending = [pid for pid in self._ending if not os.waitpid(pid, os.WNOHANG)[0]]
                for key, _ in self._selector.select(_TICK_S):
                    if self._selector.get_map().get(key.fd) is key:  # an earlier one may have ended it
                        key.data()
            return 0
        finally:
            self.close()

    def watch(self, channel: socket.socket, on_readable: Callable[[], None]) -> None:
        self._selector.register(channel, selectors.EVENT_READ, on_readable)

    def unwatch(self, channel: socket.socket) -> None:
        self._selector.unregister(channel)

    def want(
        self, key: str, *, folder: Folder | None = None, fresh: bool = False, caller: Caller | None = None
    ) -> HeldRegion:
        """The region of a checkpoint, which is fetched if it is not there, or (``fresh``, changed files) not any more.

        Never waits: it may take a while before it is sealed. Functions that have the old one keep it. ``folder``: of a
        local checkpoint, as its caller has opened it; it is taken over. ``caller``: who is charged; None: the agent.
        """
        if folder is None and not scheme_of(key):
            folder = _own_folder(key)
        slot = key if folder is None else folder.slot(key)
        held = self.regions.get(slot)
        pinned = False
        try:
            if caller is not None:
                self._check_models(slot, caller)
            if held is not None and (fresh or not held.is_current(folder)):
                logger.info("%s is fetched again: %s", redacted(key), "as asked" if fresh else "its files have changed")
                pinned = held.pinned
                self.regions.drop(held)
                held = None
            if held is not None:
                if folder is not None:
                    os.close(folder.fd)
                return held
            self._charge_fetch(caller)
        except BaseException:
            if folder is not None:
                os.close(folder.fd)
            raise
        held = HeldRegion(key, folder=folder)
        held.fetch_for = caller
        held.pinned = pinned or (slot in self._pins and slot == key)
        settings = Settings(model=key, connections=self.settings.connections, load_priority="background")
        try:
            held.fetch = start_fetch(held, settings, timeline=self._timeline, reports=self._reports)
        except BaseException:
            self._uncharge_fetch(held)
            held.close()
            raise
        self.regions.add(held)
        self.watch(held.fetch.channel, partial(self._on_fetch, held))
        logger.info("fetching %s", redacted(key))
        return held

    def _check_models(self, slot: str, caller: Caller) -> None:
        if caller.trusted:
            return
        used = {
            held.slot for held in self.regions for user in held.leases.values() if user.account == caller.account
        } | {slot}
        if len(used) > (most := self.settings.per_caller.models):
            raise NodeRefusedError(
                f"{caller.account} uses {len(used) - 1} models of the node agent's already; expected at most {most} "
                f"(--per-caller models=…)"
            )

    def _charge_fetch(self, caller: Caller | None) -> None:
        """Charge a caller for one more fetch; those that it has left alone are given up for that."""
        if caller is None:
            return
        try:
            self.accounts.take(caller, "fetches")
        except NodeRefusedError:
            left = [held for held in self.regions if held.fetch is not None and not held.in_use]
            left = [held for held in left if held.fetch_for and held.fetch_for.account == caller.account]
            if not left:
                raise
            self.regions.drop(min(left, key=lambda held: held.used_at))
            self.accounts.take(caller, "fetches")

    def _uncharge_fetch(self, held: HeldRegion) -> None:
        caller, held.fetch_for = held.fetch_for, None
        if caller is not None:
            self.accounts.give(caller, "fetches")

    def keep(self, key: str, descriptor: int, caller: Caller) -> HeldRegion:
        """Take back a region that an agent before this one made. NodeError for one that was not."""
        self._records.check(key, descriptor)
        held = self.regions.get(key)
        if held is not None:
            return held
        self._check_models(key, caller)
        held = HeldRegion(key, Region(os.dup(descriptor)))
        try:
            held.sealed = held.complete
            _check_whole(held)
            held.leases[-1] = caller  # who pays, until it has its lease
            self.regions.admit(held, os.fstat(descriptor).st_blocks * 512)
        except BaseException:
            held.close()
            raise
        del held.leases[-1]
        held.pinned = key in self._pins
        self.regions.add(held)
        self._record()
        logger.info("took back %s", redacted(key))
        return held

    def _on_fetch(self, held: HeldRegion) -> None:
        assert held.fetch is not None
        message = receive(held.fetch.channel, MOST_OF_OURS)
        if message is None:
            self._ended(held)
        elif message.kind == "room":
            answer: tuple[str, dict[str, str]] = "room", {}
            try:
                self.regions.admit(held, int(message.body["bytes"]))
            except MedusaError as error:
                logger.warning("%s", error)
                answer = "error", {"code": error.code, "message": str(error)}
            with suppress(OSError):  # it has just died; the end of its connection comes next
                send(held.fetch.channel, *answer)
        elif message.kind == "sealed":
            held.sealed = True
            held.shard_fds = message.descriptors
            self._record()
            self._tell(held, None)

    def _ended(self, held: HeldRegion) -> None:
        """The prefetcher is done, in whatever way."""
        assert held.fetch is not None
        self._end_fetch(held)
        progress = held.region.progress()
        if progress.state == "done":
            logger.info("%s is complete", redacted(held.key))
            self._record()
            return
        error: MedusaError = StorageError("its prefetcher ended early")
        if progress.error is not None:
            code, _, message = progress.error.partition(": ")
            error = from_code(code, message)
        logger.warning("%s could not be fetched: %s", redacted(held.key), error)
        self._tell(held, error)
        self._clients.lost(held, error)
        self.regions.drop(held)

    def _tell(self, held: HeldRegion, error: MedusaError | None) -> None:
        waiting, held.waiting = held.waiting, []
        for tell in waiting:
            tell(error)

    def _dropped(self, held: HeldRegion) -> None:
        if held.fetch is not None:
            self._end_fetch(held)
            error = NodeError("the node agent has given this fetch up")
            self._tell(held, error)
            self._clients.lost(held, error)
        self._give_back(held)
        self._record()

    def _give_back(self, held: HeldRegion) -> None:
        if held.size_bytes >= _MUCH_BYTES and not self._stopping:
            try:
                self._ending.append(give_back(held, timeline=self._timeline, reports=self._reports))
            except MedusaError as error:
                logger.debug("%s", error)
            else:
                logger.debug("process %d takes back the memory of %s", self._ending[-1], redacted(held.key))
                return
        held.close()

    def _end_fetch(self, held: HeldRegion) -> None:
        assert held.fetch is not None
        self.unwatch(held.fetch.channel)
        end_child(held.fetch)
        self._ending.append(held.fetch.pid)
        held.fetch = None
        self._uncharge_fetch(held)

    def _changed(self, held: HeldRegion) -> None:
        """Its objects were replaced; what is pinned is fetched again, and the rest when somebody asks."""
        if self.regions.get(held.key) is not held:
            return
        if not held.pinned:
            self.regions.drop(held)
            return
        try:
            self.want(held.key, fresh=True)
        except MedusaError as error:
            logger.warning("%s", error)

    def _fetch_pinned(self) -> None:
        """What ``--pin`` names and is not there: its store may not have answered yet."""
        if time.monotonic() < self._pin_at:
            return
        self._pin_at = time.monotonic() + _PIN_AGAIN_S
        for key in self._pins:
            try:
                self.want(key)
            except MedusaError as error:
                logger.warning("--pin: %s", error)

    def unpin(self, held: HeldRegion) -> None:
        held.pinned = False
        self._pins.discard(held.key)

    def _record(self) -> None:
        # A region of files that were read as a caller is that caller's, and is made again as quickly as it is brought.
        kept = [held for held in self.regions if held.sealed and held.slot == held.key]
        self._records.write({held.key: held.region.fd for held in kept})

    def _end_stopped(self) -> None:
        """Kill prefetchers that have been stopped; what follows is as after any other end of theirs."""
        fetching = {held.fetch.pid: held for held in self.regions if held.fetch is not None}
        for pid in self._stopped.look(fetching):
            logger.warning("the prefetcher of %s was stopped; it is ended", redacted(fetching[pid].key))
            self.replaced["prefetcher"] += 1
            os.kill(pid, signal.SIGKILL)

    def _read_reports(self) -> None:
        for report in self._reports.read():
            logger.warning("%s: %s [%s]", report.process, report.message, report.code)

    def _drain(self) -> None:
        try:
            os.read(self._stop[0], 4096)
        except BlockingIOError:
            pass

    def _on_stop(self, *_: object) -> None:
        self._stopping = True

    def close(self) -> None:
        """Functions that run go on; what is fetched or idle ends."""
        self._watchdog.close()
        signal.set_wakeup_fd(-1)
        for door in self._doors:
            door.close()
        self._clients.close()
        self.engines.close()
        self._revalidation.close()
        self._records.freeze()  # those who hold a region may bring it to the next agent
        self.regions.close()
        for pid in self._ending:
            os.waitpid(pid, 0)
        self._ending.clear()
        self._selector.close()
        self._reports.close()


def _listen(settings: NodeSettings) -> list[SocketFile]:
    doors: list[SocketFile] = []
    try:
        for listening in settings.socket:
            doors.append(SocketFile(listening.path, tuple(map(_prefix, listening.prefixes))))
    except BaseException:
        for door in doors:
            door.close()
        raise
    return doors


def _prefix(text: str) -> str:
    return text if text == "*" else text.rstrip("/") or "/"


def _check_whole(held: HeldRegion) -> None:
    if not held.complete or not held.is_current():
        raise NodeError(f"the region of {redacted(held.key)} is not complete, or its files have changed")


def _own_folder(key: str) -> Folder:
    fd = open_folder(key)
    if fd is None:
        raise NodeError(f"{key}: expected a folder, or a file in one, that user {os.geteuid()} may read")
    return Folder(fd)


__all__ = ["Agent", "Client"]
