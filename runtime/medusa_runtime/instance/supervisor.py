"""The supervisor: the one place that decides the order of a cold start.

    supervisor ─fork▶ prefetcher   storage ─fetch▶ region
               ─fork▶ zygote       import torch ─fork▶ engine: region ─load▶ layers ─run▶ tokens
               ─fork▶ function     gunicorn, user code ◀─ requests

On a node with an agent, the region and the engine process are the agent's, and only the function process is forked.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..config import NODE_SOCKET, Settings, check_engine
from ..errors import EngineError, from_code
from ..liveness import LOOK_S, Watchdog
from ..process import share_cores
from ..process_limits import make_room_for_files
from ..region.reader import Region
from ..registry import is_remote
from ..timeline import Timeline, process_start_ns
from .children import Children, Ended
from .listeners import bind, url_of
from .observer import Observer, StartReport
from .resources import InstanceHandle, InstanceResources
from .roles import run_prefetcher, run_zygote
from .stop_signals import StopSignals

if TYPE_CHECKING:
    from ..node.attachment import Attachment

logger = logging.getLogger(__name__)

_MOST_PREFETCHERS = 4  # the first one, and three that take over from a killed one
_MOST_QUICK_ENDS, _QUICK_S = 4, 60.0  # of the zygote, which should live as long as the instance
_KILL_AFTER_S = 5.0
_OBSERVED_S = 0.1  # between two reports to an observer

Function = Callable[[socket.socket, InstanceHandle, Settings], int]


def serve(settings: Settings, function: Function, observer: Observer | None = None) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP, and return the exit status. Raises the error that ended the instance."""
    check_engine(settings)
    make_room_for_files()
    timeline = Timeline.create("supervisor")
    timeline.record("exec", process_start_ns(), time.monotonic_ns())
    with timeline.stage("bind"):
        listener = bind(settings)
    with Instance(settings, timeline, listener, observer) as instance:
        instance.start(function)
        return instance.supervise()


class Instance:
    """Starts the processes of an instance, replaces those that may be replaced, and leaves nothing behind."""

    def __init__(
        self, settings: Settings, timeline: Timeline, listener: socket.socket, observer: Observer | None
    ) -> None:
        self._settings = settings
        self._timeline = timeline
        self._resources = InstanceResources(settings, timeline, listener)
        self._children = Children(timeline, self._resources.reports)
        self._signals = StopSignals(lambda: self._children.stop("function"))
        self._report = StartReport(observer, timeline, has_handler=settings.handler is not None)
        self._watchdog = Watchdog(self._resources.heartbeats)
        self._node: Attachment | None = None
        self._engine_started = False
        self._prefetchers = 0
        self._zygote_ends: list[float] = []

    def __enter__(self) -> Instance:
        self._signals.install()
        return self

    def start(self, function: Function) -> None:
        """Make the shared things, then fork: the prefetcher first, since the network takes longest."""
        resources, settings = self._resources, self._settings
        resources.heartbeats.enter("supervisor")
        share_cores()
        with self._timeline.stage("fork"):
            if settings.model is not None:
                self._take_or_make_region()
            if settings.model is not None and settings.engine != "none":
                resources.open_engine_socket()
                if settings.engine_start == "now":
                    self._take_or_fork_engine()
            handle = resources.handle()
            self._children.fork("function", lambda _: function(resources.listener, handle, settings))
        if self._signals.stop_requested:  # before there was a function process to signal
            self._children.stop("function")
        self._report.bound(url_of(resources.listener))
        # Only the function process accepts. Once it is gone, connections must be refused, and not queue for ever.
        resources.listener.close()

    def _take_or_make_region(self) -> None:
        if has_agent(self._settings):
            from ..node.attachment import Attachment

            self._node = Attachment.attach(self._settings, self._timeline)
        if self._node is not None:
            self._resources.region = self._node.region
        else:
            self._make_region()

    def _make_region(self) -> None:
        self._resources.region = Region.create()
        self._fork_prefetcher()

    def _take_or_fork_engine(self) -> None:
        listener = self._resources.engine_listener
        assert listener is not None
        self._engine_started = True
        if self._node is None or not self._node.take_engine(listener, self._timeline, self._resources.reports):
            self._fork_zygote()

    def _fork_prefetcher(self) -> None:
        self._prefetchers += 1
        self._children.fork("prefetcher", partial(run_prefetcher, self._resources))

    def _fork_zygote(self) -> None:
        of_node = self._node is not None and self._resources.region is self._node.region
        self._children.fork("zygote", partial(run_zygote, self._resources, region_of_node=of_node))

    def supervise(self) -> int:
        """Run until the function process has ended, and return the exit status. Raises a child's fatal error."""
        poll = select.poll()
        poll.register(self._signals.wakeup_fd, select.POLLIN)
        poll.register(self._resources.reports.read_fd, select.POLLIN)
        while True:
            extra = self._also_watched()
            for fd in extra:
                poll.register(fd, select.POLLIN)
            readable = {fd for fd, _ in poll.poll(1e3 * (LOOK_S if self._report.is_over else _OBSERVED_S))}
            for fd in extra:
                poll.unregister(fd)
            self._signals.drain()
            status = self._look(readable, extra)
            if status is not None:
                return status

    def _look(self, readable: set[int], extra: set[int]) -> int | None:
        """React to everything that has happened. Return the exit status if the instance has ended, or else None."""
        listener, node, signals = self._resources.engine_listener, self._node, self._signals
        if listener is not None and listener.fileno() in readable & extra:
            self._take_or_fork_engine()
        for report in self._resources.reports.read():
            logger.debug("%s reported %s", report.process, report.code)
            raise from_code(report.code, report.message)
        for ended in self._children.reap():
            if ended.name == "function":
                if signals.stop_requested:
                    return 0 if ended.status in (0, -signal.SIGTERM) else 1
                raise EngineError(f"the function process ended by itself ({ended.how})")
            if not signals.stop_requested:
                self._replace(ended)
        if node is not None:
            self._look_at_node(node, readable)
        if signals.immediate:
            return 1
        if signals.seconds_since_request() > self._settings.drain_s + _KILL_AFTER_S:
            logger.warning("requests were still running %.0f s after SIGTERM; ending them", self._settings.drain_s)
            return 1
        if self._watchdog.due():
            self._watch()
        self._report.update(self._resources.region)
        return None

    def _also_watched(self) -> set[int]:
        watched = set() if self._node is None else set(self._node.descriptors)
        if self._resources.engine_listener is not None and not self._engine_started:
            watched.add(self._resources.engine_listener.fileno())  # the first request connects to it
        return watched

    def _watch(self) -> None:
        """Kill hung processes, which are then replaced as after a crash.

        If the function process hangs, that ends the instance. The function process itself watches its worker.
        """
        heartbeats = self._resources.heartbeats
        heartbeats.beat("supervisor")
        self._children.out_of_memory.look()
        if self._signals.stop_requested:
            return
        for role in ("function", "zygote", "prefetcher"):
            self._watchdog.look(role, self._children.pid(role), os.getpid())
        zygote = self._children.pid("zygote")
        self._watchdog.look("engine", heartbeats.pid("engine") if zygote else 0, zygote)

    def _look_at_node(self, node: Attachment, readable: set[int]) -> None:
        """Replace a region or engine that the agent no longer provides by processes of the instance's own."""
        from ..node.attachment import Loss

        for loss in node.take_losses(readable):
            if self._signals.stop_requested:
                continue
            if loss is Loss.ENGINE:
                logger.error("the node's engine process ended; starting one of our own (the agent's log may say why)")
                self._fork_zygote()
            else:
                self._replace_region(node)

    def _replace_region(self, node: Attachment) -> None:
        """Fetch a region that the agent will never complete. The function keeps the old one for its small files."""
        node.forget_region()
        self._make_region()
        had_engine = node.release_engine()
        had_zygote = self._children.kill("zygote")
        if had_engine or had_zygote:
            self._fork_zygote()

    def _replace(self, ended: Ended) -> None:
        """Replace a child other than the function process. Raises EngineError if it has ended too often."""
        if ended.name != "prefetcher":
            self._replace_zygote(ended)
        elif ended.status == 0:
            self._resources.heartbeats.leave("prefetcher")
        elif self._prefetchers >= _MOST_PREFETCHERS:
            raise EngineError(f"the prefetcher ended {self._prefetchers} times before it was done ({ended.how})")
        else:
            logger.error("the prefetcher ended early (%s); another takes over", ended.how)
            self._fork_prefetcher()

    def _replace_zygote(self, ended: Ended) -> None:
        self._zygote_ends = [end for end in self._zygote_ends if end > time.monotonic() - _QUICK_S]
        self._zygote_ends.append(time.monotonic())
        if len(self._zygote_ends) >= _MOST_QUICK_ENDS:
            raise EngineError(
                f"the process that imports the engine ended {_MOST_QUICK_ENDS} times within a minute "
                f"({ended.how}); if this is SIGKILL, memory ran out: expected some 300 MB beside the "
                f"weights, give the container more"
            )
        logger.error("the zygote ended (%s); starting another", ended.how)
        self._fork_zygote()

    def __exit__(self, *_: object) -> None:
        self._signals.ignore()
        if self._node is not None:
            self._node.close()
        self._children.close()
        self._signals.close()
        self._resources.close()


def has_agent(settings: Settings) -> bool:
    """Return whether to use a node agent: its socket is named in the settings, or the default one exists.

    This costs at most one system call.
    """
    if is_remote(settings.engine):
        return False
    if settings.node_socket is not None:
        return settings.node_socket != "none"
    return os.path.exists(NODE_SOCKET)


__all__ = ["Function", "Instance", "serve"]
