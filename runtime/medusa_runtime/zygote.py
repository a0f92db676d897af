"""The zygote: the process that does an engine's heavy imports once, and from which engines are forked.

It does nothing but import. After torch has used OpenMP, or anything has touched CUDA, a fork would hang or break the
child.

On a GPU, the first engine is forked before the imports. It creates the device's context while it imports (ParaServe
§5), which the zygote itself must not do. The zygote imports once that engine is ready, for an engine that may have to
replace it.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .config import Settings
from .container_limits import OutOfMemory, signal_name
from .device.choice import choose, warn_without_effect
from .device.context import DeviceContext
from .engine.base import Engine
from .engine.server import EngineServer
from .errors import EngineError
from .liveness import LOOK_S, Heartbeats
from .process import ReportPipe, fork
from .region.reader import Region
from .registry import engine_kind, imported
from .timeline import Timeline

logger = logging.getLogger(__name__)

EngineClass = Callable[[Region, Settings, Timeline], Any]

_MOST_QUICK_CRASHES = 3
_QUICK_S = 10.0
RESTART = 75  # the exit status with which an engine asks to be replaced, once (EX_TEMPFAIL of sysexits.h)


class Zygote:
    """Imports what the engine needs, then keeps one forked engine running."""

    def __init__(
        self,
        listener: socket.socket,
        region: Region,
        settings: Settings,
        *,
        timeline: Timeline,
        reports: ReportPipe,
        heartbeats: Heartbeats,
    ) -> None:
        self._listener = listener
        self._region = region
        self._settings = settings
        self._timeline = timeline
        self._reports = reports
        self._heartbeats = heartbeats
        self._out_of_memory = OutOfMemory()

    def run(self) -> int:
        """Run engines until one ends by itself, and return its exit status. An engine killed by a signal is replaced.

        Raises EngineError after three crashes in a row that came early, and if the engine cannot be imported.
        """
        self._heartbeats.enter("zygote")
        gc.disable()  # nothing that is imported becomes garbage
        self._settings = replace(self._settings, device=choose(self._settings.device, os.environ))
        warn_without_effect(self._settings)
        first = self._fork_ahead() if self._on_gpu else None
        engine_class = self._import_engine(self._timeline)
        gc.freeze()  # the collector of a child would otherwise write to, and so copy, every shared page
        quick_crashes, restarted = 0, False
        while True:
            started = time.monotonic()
            if first is None:
                first = self._fork(lambda _: engine_class)
            pid, ready = first
            first = None
            self._out_of_memory.look()
            status = os.waitstatus_to_exitcode(self._wait(pid))
            was_ready = _said_anything(ready)
            if status == RESTART and not restarted:
                restarted = True
                continue
            if status >= 0:
                return status
            early = not was_ready or time.monotonic() - started < _QUICK_S
            quick_crashes = quick_crashes + 1 if early else 0
            name, how = signal_name(-status), self._out_of_memory.how(status)
            if quick_crashes >= _MOST_QUICK_CRASHES:
                raise EngineError(
                    f"the engine process was killed by {name} {quick_crashes} times in a row, "
                    f"{'while it worked' if was_ready else 'before it was ready'}{_MEANINGS.get(name, '')}"
                )
            logger.error("the engine process was %s; forking a new one", how)

    def _wait(self, pid: int) -> int:
        """Wait for a child's end, send heartbeats meanwhile, and return the status of ``waitpid``.

        There is no thread for the heartbeats, because a process that forks must have a single one.
        """
        try:
            ended = os.pidfd_open(pid)
        except OSError:  # a sandbox without pidfd_open(2)
            return os.waitpid(pid, 0)[1]
        self._beat_until(ended)
        os.close(ended)
        return os.waitpid(pid, 0)[1]

    def _beat_until(self, readable: int) -> None:
        poll = select.poll()
        poll.register(readable, select.POLLIN)
        while not poll.poll(LOOK_S * 1e3):
            self._heartbeats.beat("zygote")
            self._out_of_memory.look()

    @property
    def _on_gpu(self) -> bool:
        return self._settings.device == "cuda" and engine_kind(self._settings.engine).owns_gpu_context

    def _fork_ahead(self) -> tuple[int, int]:
        """Fork the first engine before anything is imported, and return when it is ready or has ended."""
        pid, ready = self._fork(self._import_engine)
        self._beat_until(ready)
        return pid, ready

    def _fork(self, load: Callable[[Timeline], EngineClass]) -> tuple[int, int]:
        """Fork an engine and return its pid and a pipe.

        A byte comes through the pipe once the engine is ready, and the pipe ends when the engine does.
        """
        ready, announce = os.pipe2(os.O_CLOEXEC)

        def body(timeline: Timeline) -> int:
            os.close(ready)
            return self._serve(load, timeline, lambda: os.write(announce, b"r"))

        pid = fork("engine", body, timeline=self._timeline, reports=self._reports)
        os.close(announce)
        return pid, ready

    def _import_engine(self, timeline: Timeline) -> EngineClass:
        with timeline.stage("import", engine=self._settings.engine):
            try:
                return load_engine_class(self._settings, self._region)
            except ImportError as error:
                raise EngineError(
                    f"the {self._settings.engine} engine cannot be imported ({error}); expected its packages to be "
                    f"installed, and memory for their libraries"
                ) from error

    def _serve(
        self, load: Callable[[Timeline], EngineClass], timeline: Timeline, on_ready: Callable[[], object]
    ) -> int:
        """Run the whole life of the engine process, and return its exit status."""
        self._heartbeats.keep("engine")
        context = DeviceContext(timeline=timeline) if self._on_gpu else None
        engine_class = load(timeline)
        gc.enable()
        if context is not None:
            context.wait()  # this error names the GPU that cannot be used; torch's would not
        return run_engine(
            lambda: engine_class(self._region, self._settings, timeline),
            self._listener,
            timeline=timeline,
            reports=self._reports,
            on_ready=on_ready,
        )


_MEANINGS = {
    "SIGKILL": ": memory ran out; expected it to stay within the container's limit",
    "SIGILL": ": its libraries use instructions that this machine's processor does not have, or does not permit",
    "SIGBUS": ": memory that it had mapped is gone, such as a file that became shorter",
}


def _said_anything(pipe: int) -> bool:
    """Return whether a byte was written into a pipe whose writer has ended, and close the pipe."""
    os.set_blocking(pipe, False)  # a process that the writer has forked may still hold the other end
    try:
        return bool(os.read(pipe, 1))
    except BlockingIOError:
        return False
    finally:
        os.close(pipe)


def load_engine_class(settings: Settings, region: Region | None = None) -> EngineClass:
    """Import what an engine needs and return the function that opens it. Never touches CUDA.

    With a ``region``, also import what its model needs.
    """
    kind = engine_kind(settings.engine)
    imported(kind.preimport)(settings, region)
    return imported(kind.open)


def run_engine(
    make: Callable[[], Engine],
    listener: socket.socket,
    *,
    timeline: Timeline,
    reports: ReportPipe,
    on_ready: Callable[[], object] | None = None,
) -> int:
    """Serve on ``listener`` with the engine that ``make`` returns, until SIGTERM. Returns the exit status, 0.

    ``on_ready`` is called, from another thread, once the engine is ready. If it cannot become ready, the error is sent
    to ``reports`` and this function returns.
    """
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    engine = make()
    server = EngineServer(listener, engine)
    server.start()

    def announce() -> None:
        try:
            engine.wait_ready()
        except Exception as error:  # noqa: BLE001  an engine that never gets ready must end, whatever the reason
            reports.send("engine", error)
            stop.set()
            return
        timeline.mark("ready")
        server.announce_ready()
        if on_ready is not None:
            on_ready()

    threading.Thread(target=announce, daemon=True).start()
    try:
        engine.run(stop)
    finally:
        server.close()
        engine.close()
    return 0
