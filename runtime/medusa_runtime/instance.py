"""One instance of a function: the one place that orders the stages of its cold start.

    supervisor ─fork▶ prefetcher   storage ─fetch▶ region
               ─fork▶ zygote       import torch ─fork▶ engine: region ─load▶ layers ─run▶ tokens
               ─fork▶ function     gunicorn, user code ◀─ requests

On a node with an agent the region and the engine process are taken from it; only the function is forked.
Everything the three share exists before they are forked, so that none waits for another to appear.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Protocol

from .config import NODE_SOCKET, Settings, require_handler
from .engine.client import EngineClient
from .errors import ConfigError, EngineError, MedusaError, from_code
from .liveness import LOOK_S, Heartbeats, Watchdog
from .process import ReportPipe, fork, share_cores
from .region.reader import Progress, Region
from .registry import engine_kind
from .resource_limits import as_limit_error, make_room_for_files
from .timeline import Stage, Timeline, process_start_ns

if TYPE_CHECKING:
    from .node.attachment import Attachment

logger = logging.getLogger(__name__)

_MOST_PREFETCHERS = 4  # the first and three that take over from a killed one
_MOST_QUICK_ENDS, _QUICK_S = 4, 60.0  # of the zygote, which otherwise lives as long as the instance
_KILL_AFTER_S = 5.0
_NOW = -1.0  # as the time at which to stop: without draining
_AGAIN_S = 0.5  # a signal that comes sooner is the first one: timeout(1) sends it to us and to our group, npm as well
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class InstanceHandle:
    """What the function process is given. ``region`` is None without a checkpoint, ``engine`` also when the function
    builds the model itself (``--engine none``)."""

    settings: Settings
    timeline: Timeline
    engine: EngineClient | None
    region: Region | None
    reports: ReportPipe
    heartbeats: Heartbeats

    def fail(self, error: MedusaError) -> None:
        """End the whole instance with this error."""
        self.reports.send("function", error)


class Observer(Protocol):
    """Who watches a start, from the supervisor; called a few times a second at most."""

    def bound(self, url: str) -> None: ...

    def progress(self, progress: Progress) -> None: ...

    def ready(self, stages: list[Stage]) -> None:
        """The model is loaded, or there is none and the function answers."""

    def first_token(self, stages: list[Stage]) -> None: ...


Function = Callable[[socket.socket, InstanceHandle, Settings], int]


def bind(settings: Settings) -> socket.socket:
    """The listening socket. Raises ConfigError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {settings.host}:{settings.port}: {error.strerror}; "
            f"expected a free port, choose another with --port (0 takes any)"
        ) from None
    return listener


def serve(settings: Settings, function: Function, observer: Observer | None = None) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status. Raises the MedusaError that ended the instance."""
    require_handler(settings)
    make_room_for_files()
    timeline = Timeline.create("supervisor")
    timeline.record("exec", process_start_ns(), time.monotonic_ns())
    with timeline.stage("bind"):
        listener = bind(settings)
    with Instance(settings, timeline, listener, observer) as instance:
        instance.start(function)
        return instance.supervise()


class Instance:
    """The supervisor's side: starts the processes, replaces what may be replaced, leaves nothing behind."""

    def __init__(
        self, settings: Settings, timeline: Timeline, listener: socket.socket, observer: Observer | None
    ) -> None:
        self._settings = settings
        self._timeline = timeline
        self._listener = listener
        self._observer = observer
        self._reports = ReportPipe()
        self._heartbeats = Heartbeats()
        self._watchdog = Watchdog(self._heartbeats)
        self._children: dict[int, str] = {}
        self._prefetchers = 0
        self._zygote_ends: list[float] = []
        self._engine_listener: socket.socket | None = None
        self._region: Region | None = None
        self._node: Attachment | None = None
        self._engine_started = False
        self._stop_asked = 0.0
        self._wakeup = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._seen: set[str] = set()
        self._stage_bytes = 0

    def __enter__(self) -> Instance:
        signal.set_wakeup_fd(self._wakeup[1], warn_on_full_buffer=False)
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:  # nohup means it
                signal.signal(number, self._on_stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def start(self, function: Function) -> None:
        """Make what is shared, then fork: the prefetcher first, since the network takes longest."""
        engine: EngineClient | None = None
        self._heartbeats.enter("supervisor")
        share_cores()
        with self._timeline.stage("fork"):
            if self._settings.model is not None:
                self._take_or_make_region()
            if self._settings.model is not None and self._settings.engine != "none":
                self._engine_listener, path = _private_listener()
                engine = EngineClient(path)
                if self._settings.engine_start == "now":
                    self._take_or_fork_engine()
            handle = InstanceHandle(
                self._settings,
                self._timeline.named("function"),
                engine,
                self._region,
                self._reports,
                self._heartbeats,
            )
            self._fork("function", lambda _: function(self._listener, handle, self._settings))
        if self._stop_asked:  # before there was a function process to tell
            self._stop_function()
        if self._observer:
            host, port = self._listener.getsockname()[:2]
            self._observer.bound(f"http://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{port}")
        # The function process alone accepts; were it gone, connections should be refused, not queued here for ever.
        self._listener.close()

    def _fork(self, name: str, body: Callable[[Timeline], int]) -> None:
        self._children[fork(name, body, timeline=self._timeline, reports=self._reports)] = name

    def _take_or_make_region(self) -> None:
        if has_agent(self._settings):
            from .node.attachment import Attachment

            self._node = Attachment.attach(self._settings, self._timeline)
        if self._node is not None:
            self._region = self._node.region
        else:
            self._region = Region.create()
            self._fork_prefetcher()

    def _take_or_fork_engine(self) -> None:
        assert self._engine_listener is not None
        self._engine_started = True
        if self._node is None or not self._node.take_engine(self._engine_listener, self._timeline, self._reports):
            self._fork("zygote", self._run_zygote)

    def _look_at_node(self, readable: set[int]) -> None:
        """The agent's part may end at any time; then it goes on with processes of its own."""
        assert self._node is not None
        for loss in self._node.look(readable):
            if self._stop_asked:
                continue
            if loss is loss.ENGINE:
                logger.error("the node's engine process ended; starting one of our own")
                self._fork("zygote", self._run_zygote)
            else:
                self._replace_region()

    def _replace_region(self) -> None:
        """The agent's will never be complete. The function keeps it: small files and index are all it reads."""
        assert self._node is not None
        self._node.forget_region()
        self._region = Region.create()
        self._fork_prefetcher()
        had_engine = self._node.let_go_of_engine()
        for pid in [pid for pid, name in self._children.items() if name == "zygote"]:
            _end_group(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            del self._children[pid]
            had_engine = True
        if had_engine:
            self._fork("zygote", self._run_zygote)

    def _fork_prefetcher(self) -> None:
        self._prefetchers += 1
        self._fork("prefetcher", self._run_prefetcher)

    def _run_prefetcher(self, timeline: Timeline) -> int:
        self._listener.close()
        self._heartbeats.keep("prefetcher")
        with timeline.stage("import"):
            from .fetch.prefetcher import BESIDE_IMPORTS, prefetch
            from .state.restore import Restoration

        assert self._region is not None
        assert self._settings.model is not None
        model, settings = self._settings.model, self._settings
        restoring = Restoration(settings, timeline)
        prefetch(self._region, model, settings=settings, timeline=timeline, nice=BESIDE_IMPORTS, restoring=restoring)
        return 0

    def _run_zygote(self, timeline: Timeline) -> int:
        self._listener.close()
        with timeline.stage("import"):
            from .zygote import Zygote

        assert self._region is not None
        assert self._engine_listener is not None
        if self._node is not None and self._region is self._node.region:
            self._attach_code(timeline)
        return Zygote(
            self._engine_listener,
            self._region,
            self._settings,
            timeline=timeline,
            reports=self._reports,
            heartbeats=self._heartbeats,
        ).run()

    def _attach_code(self, timeline: Timeline) -> None:
        """What an agent gives to nobody: compiled code and graphs, for the engines that have any."""
        from .device.choice import choose

        settings = self._settings
        if settings.state is None and (
            engine_kind(settings.engine).compiles_on_cpu or choose(settings.device, os.environ) == "cuda"
        ):
            from .state.attach_artifacts import attach_artifacts

            assert self._region is not None
            assert settings.model is not None
            attach_artifacts(self._region, settings.model, settings, timeline)

    def supervise(self) -> int:
        """Until the function process has ended. Raises what a child reported as fatal."""
        poll = select.poll()
        poll.register(self._wakeup[0], select.POLLIN)
        poll.register(self._reports.read_fd, select.POLLIN)
        while True:
            extra = self._also_watched()
            for fd in extra:
                poll.register(fd, select.POLLIN)
            readable = {fd for fd, _ in poll.poll(self._tick_ms())}
            for fd in extra:
                poll.unregister(fd)
            self._drain_wakeup()
            if self._engine_listener is not None and self._engine_listener.fileno() in readable & extra:
                self._take_or_fork_engine()
            for report in self._reports.read():
                logger.debug("%s reported %s", report.process, report.code)
                raise from_code(report.code, report.message)
            for pid, status in self._reap():
                name = self._children.pop(pid)
                if name == "function":
                    if self._stop_asked:
                        return 0 if status in (0, -signal.SIGTERM) else 1
                    raise EngineError(f"the function process ended by itself ({_describe(status)})")
                self._replace(name, status)
            if self._node is not None:
                self._look_at_node(readable)
            if self._stop_asked == _NOW:
                return 1
            if self._stop_asked and time.monotonic() > self._stop_asked + self._settings.drain_s + _KILL_AFTER_S:
                logger.warning("requests were still running %.0f s after SIGTERM; ending them", self._settings.drain_s)
                return 1
            if self._watchdog.due():
                self._watch()
            self._observe()

    def _watch(self) -> None:
        """Look at every process but the worker, which is the function process's own child. Hung ones are killed, and
        then replaced as after a crash; for the function process that means the end of the instance."""
        self._heartbeats.beat("supervisor")
        if self._stop_asked:
            return
        pids = {name: pid for pid, name in self._children.items()}
        for role in ("function", "zygote", "prefetcher"):
            self._watchdog.look(role, pids.get(role, 0), os.getpid())
        zygote = pids.get("zygote", 0)
        self._watchdog.look("engine", self._heartbeats.pid("engine") if zygote else 0, zygote)

    def _also_watched(self) -> set[int]:
        watched = set() if self._node is None else set(self._node.descriptors)
        if self._engine_listener is not None and not self._engine_started:
            watched.add(self._engine_listener.fileno())  # the first request connects to it
        return watched

    def _replace(self, name: str, status: int) -> None:
        """A child other than the function process has ended."""
        if self._stop_asked:
            return
        if name == "prefetcher":
            if status == 0:
                self._heartbeats.leave("prefetcher")
                return
            if self._prefetchers >= _MOST_PREFETCHERS:
                raise EngineError(
                    f"the prefetcher ended {self._prefetchers} times before it was done ({_describe(status)})"
                )
            logger.error("the prefetcher ended early (%s); another takes over", _describe(status))
            self._fork_prefetcher()
        else:
            self._zygote_ends = [end for end in self._zygote_ends if end > time.monotonic() - _QUICK_S]
            self._zygote_ends.append(time.monotonic())
            if len(self._zygote_ends) >= _MOST_QUICK_ENDS:
                raise EngineError(
                    f"the process that imports the engine ended {_MOST_QUICK_ENDS} times within a minute "
                    f"({_describe(status)}); if this is SIGKILL, memory ran out: expected some 300 MB beside the "
                    f"weights, give the container more"
                )
            logger.error("the zygote ended (%s); starting another", _describe(status))
            self._fork("zygote", self._run_zygote)

    def _reap(self) -> list[tuple[int, int]]:
        ended = []
        for pid in tuple(self._children):
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                ended.append((pid, os.waitstatus_to_exitcode(status)))
        if os.getpid() == 1:  # as a container's init also reap what lost its parent
            try:
                while (orphan := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                    if orphan.si_pid in self._children:
                        break
                    os.waitpid(orphan.si_pid, os.WNOHANG)
            except ChildProcessError:
                pass
        return ended

    def _on_stop(self, number: int, _frame: FrameType | None) -> None:
        """First signal: drain. A second Ctrl-C: stop now."""
        if self._stop_asked:
            if time.monotonic() > self._stop_asked + _AGAIN_S:
                self._stop_asked = _NOW
            return
        self._stop_asked = time.monotonic()
        self._stop_function()

    def _stop_function(self) -> None:
        for pid, name in tuple(self._children.items()):
            if name == "function":
                os.kill(pid, signal.SIGTERM)

    def _tick_ms(self) -> int:
        if self._observer and "first_token" not in self._seen:
            return 100
        return int(LOOK_S * 1000)

    def _drain_wakeup(self) -> None:
        try:
            os.read(self._wakeup[0], 4096)
        except BlockingIOError:
            pass

    def _observe(self) -> None:
        if self._observer is None or "first_token" in self._seen:
            return
        size = os.fstat(self._timeline.fd).st_size
        if size != self._stage_bytes:
            self._stage_bytes = size
            stages = self._timeline.stages()
            names = {stage.name for stage in stages}
            for name, tell in (("ready", self._observer.ready), ("first_token", self._observer.first_token)):
                if name in names and name not in self._seen:
                    self._seen.add(name)
                    tell(stages)
        if self._region is not None and "ready" not in self._seen:
            self._observer.progress(self._region.progress())

    def __exit__(self, *_: object) -> None:
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if self._node is not None:
            self._node.close()
        for pid in self._children:
            _end_group(pid, signal.SIGTERM)
        deadline = time.monotonic() + 2.0
        while self._children and time.monotonic() < deadline:
            for pid, _status in self._reap():
                del self._children[pid]
            time.sleep(0.01)
        for pid in tuple(self._children):
            _end_group(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self._children.clear()
        signal.set_wakeup_fd(-1)
        if self._engine_listener is not None:
            self._engine_listener.close()
        if self._region is not None:
            self._region.close()
        self._reports.close()
        self._listener.close()


def _private_listener() -> tuple[socket.socket, str]:
    """The engine's socket, and the path by which this process and those forked from it connect to it.

    Its name is removed at once: nobody else can connect, and a killed instance leaves nothing behind. Descriptors
    lead to it through /proc, as they do past the 107 bytes that the path of a Unix socket may have.
    Raises ConfigError when no folder is writable.
    """
    folder = _private_folder()
    try:
        inside = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.bind(f"/proc/self/fd/{inside}/engine")
        listener.listen(64)
        named = os.open("engine", os.O_PATH | os.O_CLOEXEC, dir_fd=inside)
        os.close(inside)
    except OSError as error:
        if as_limit_error(error):
            raise
        raise _no_folder(error) from None
    finally:
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(folder, "engine"))
        os.rmdir(folder)
    return listener, f"/proc/self/fd/{named}"


def _private_folder() -> str:
    """A new one. The tempfile module would not take a folder on a full disk, where a socket still has room."""
    failures = []
    for place in filter(None, (os.environ.get("TMPDIR"), "/tmp", "/var/tmp")):
        folder = os.path.join(place, f"medusa-{os.urandom(8).hex()}")
        try:
            os.mkdir(folder, 0o700)
            return folder
        except OSError as error:
            failures.append(error)
    raise _no_folder(failures[0])


def _no_folder(error: OSError) -> ConfigError:
    return ConfigError(f"expected a writable folder for temporary files, found none ({error}); set TMPDIR")


def has_agent(settings: Settings) -> bool:
    """Whether to ask a node agent: one was named, or is where it is by default. Costs one system call without."""
    if settings.node_socket is not None:
        return settings.node_socket != "none"
    return os.path.exists(NODE_SOCKET)


def _end_group(pid: int, number: int) -> None:
    """Signal a child and its own children (each child leads a process group)."""
    for send in (os.killpg, os.kill):
        try:
            send(pid, number)
        except ProcessLookupError:
            pass


def _describe(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
