"""The node agent: hands out regions and pre-warmed engine processes over its socket.

It has a single thread, which runs a loop, because it forks. It never waits: work that takes time is done by children.

    function ─region▶ agent ─fork▶ prefetcher     storage ─fetch▶ region, handed out read-only to any number
             ─engine▶ agent ─fork▶ zygote ─fork▶ idle engine ◀─ the function's socket, region, settings

A lease is a connection: the kernel closes it when the function ends, however it ends.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..container_limits import OutOfMemory
from ..device.choice import obstacle
from ..errors import ConfigError
from ..process import ReportPipe, share_cores
from ..process_limits import make_room_for_files
from ..timeline import Timeline
from .callers.accounts import Accounts
from .callers.policy import Policy
from .companion import Companion, CompanionProcess
from .connections import Connections
from .engines.pool import EnginePool
from .event_loop import EventLoop
from .regions.fetching import preload
from .regions.keeper import RegionKeeper
from .regions.model_key import absolute, model_key
from .services import Services
from .settings import NodeSettings
from .socket_file import SocketFile
from .watchdog import Watchdog

if TYPE_CHECKING:
    from .regions.cluster_sources import ClusterAccess

logger = logging.getLogger(__name__)

_TICK_S = 0.5
_LEAST_TICK_S = 0.05  # a tick reads files of the kernel; after each message, it would cost more than the message


class Agent:
    """The agent. ``run`` serves until SIGTERM, SIGINT or SIGHUP."""

    def __init__(self, settings: NodeSettings, companion: Companion | None = None) -> None:
        """Listen on the sockets. ``companion`` runs beside the agent.

        Raises ConfigError if another agent serves one of them, or one is not available. Raises LimitError if too few
        files may be open, since each function needs one.
        """
        make_room_for_files()
        if settings.gpu_context and (missing := obstacle(os.environ)):
            raise ConfigError(f"--gpu-context yes cannot be had: {missing}; or leave it out")
        cluster = _cluster(settings)
        preload(in_cluster=cluster is not None)
        settings = replace(settings, memory_budget_bytes=settings.budget_bytes())
        pins = [model_key(absolute(url)) for url in settings.pin]
        policy = Policy(settings.allow, settings.quota, [listener.prefixes for listener in settings.socket])
        accounts = Accounts(settings.per_caller, settings.memory_budget_bytes)
        self._out_of_memory = OutOfMemory()
        self._loop = EventLoop()
        self._reports = ReportPipe()
        timeline = Timeline.create("node")
        self._sockets = _listen(settings)
        keeper = RegionKeeper(
            settings,
            policy,
            accounts,
            pins=pins,
            on_lost=lambda entry, error: self._connections.report_loss(entry, error),
            loop=self._loop,
            timeline=timeline,
            reports=self._reports,
            out_of_memory=self._out_of_memory,
            cluster=cluster,
        )
        engines = EnginePool(
            settings.prewarm,
            gpu_context=settings.gpu_context,
            torch_import=settings.torch_import,
            timeline=timeline,
            reports=self._reports,
            loop=self._loop,
        )
        self._services = Services(settings, policy, accounts, keeper, engines)
        self._connections = Connections(self._services, self._loop)
        self._companion = companion and CompanionProcess(
            companion, timeline=timeline, reports=self._reports, loop=self._loop
        )
        self._watchdog = Watchdog()
        self._wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._tick_at = 0.0
        self._stopping = False

    @property
    def budget_bytes(self) -> int:
        """The memory that all models may take together."""
        return self._services.settings.memory_budget_bytes

    def run(self, announce: Callable[[], None] = lambda: None) -> int:
        """Serve until SIGTERM, SIGINT or SIGHUP, and return 0. ``announce`` is called as soon as these are heeded."""
        share_cores()
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_stop)
        try:
            announce()
            for listener in self._sockets:
                self._loop.watch(listener.socket, partial(self._connections.accept, listener))
            self._loop.watch(self._wakeup[0], self._drain)
            self._loop.watch(self._reports.read_fd, self._read_reports)
            self._watchdog.start()
            while not self._stopping:
                self._watchdog.beat()
                self._loop.run_once(self._tick(), self._watchdog.beat)
            return 0
        finally:
            self.close()

    def _tick(self) -> float:
        """Do the periodic work if it is due, and return for how many seconds to wait for messages then."""
        if (early_s := self._tick_at - time.monotonic()) > 0:
            return early_s
        if self._out_of_memory.look():
            logger.error("%s: the kernel has killed a process of the node agent's", self._out_of_memory.words())
        self._services.engines.tick()
        self._connections.tick()
        self._services.keeper.tick()
        if self._companion is not None:
            self._companion.tick()
        self._tick_at = time.monotonic() + _LEAST_TICK_S
        return _TICK_S

    def _read_reports(self) -> None:
        for report in self._reports.read():
            logger.warning("%s: %s [%s]", report.process, report.message, report.code)

    def _drain(self) -> None:
        try:
            os.read(self._wakeup[0], 4096)
        except BlockingIOError:
            pass

    def _on_stop(self, *_: object) -> None:
        self._stopping = True

    def close(self) -> None:
        """Stop serving. Running functions go on, while fetches and idle processes end."""
        self._watchdog.close()
        signal.set_wakeup_fd(-1)
        for listener in self._sockets:
            listener.close()
        self._connections.close()
        if self._companion is not None:
            self._companion.close()
        self._services.engines.close()
        self._services.keeper.close()
        self._loop.close()
        self._reports.close()


def _cluster(settings: NodeSettings) -> ClusterAccess | None:
    access = settings.peer_access()
    if access is None or settings.cluster is None:
        return None
    from .regions.cluster_sources import ClusterAccess  # imported here once, instead of in each prefetcher

    return ClusterAccess(settings.cluster, access)


def _listen(settings: NodeSettings) -> list[SocketFile]:
    sockets: list[SocketFile] = []
    try:
        for listener in settings.socket:
            sockets.append(SocketFile(listener.path, listener.prefixes))
    except BaseException:
        for one in sockets:
            one.close()
        raise
    return sockets


__all__ = ["Agent"]
