"""The process that does an engine's heavy imports once, and from which engines are forked.

It only imports: after torch has used OpenMP, or anything has touched CUDA, a fork hangs or breaks the child.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from .config import Settings
from .engine.base import Engine
from .engine.server import EngineServer
from .errors import EngineError, MedusaError
from .process import ReportPipe, fork
from .timeline import Timeline
from .weights.region import Region

logger = logging.getLogger(__name__)

_ENGINES = {"torch": "medusa_runtime.engine.torch_engine:TorchEngine"}
_MOST_QUICK_CRASHES = 3
_QUICK_S = 10.0


class Zygote:
    """Imports what the engine needs, then keeps one engine forked from itself running."""

    def __init__(
        self, listener: socket.socket, region: Region, settings: Settings, timeline: Timeline, reports: ReportPipe
    ) -> None:
        self._listener = listener
        self._region = region
        self._settings = settings
        self._timeline = timeline
        self._reports = reports

    def run(self) -> int:
        """Returns when an engine ended by itself; a crashed engine (killed by a signal) is replaced."""
        gc.disable()  # nothing that is imported becomes garbage
        with self._timeline.stage("import", engine=self._settings.engine):
            try:
                engine_class = self._import_engine()
            except ImportError as error:
                raise EngineError(
                    f"the {self._settings.engine} engine cannot be imported ({error}); expected its packages to be "
                    f"installed, and memory for their libraries"
                ) from error
        gc.freeze()  # the collector of a child would otherwise write to, and so copy, every shared page
        quick_crashes = 0
        while True:
            started = time.monotonic()
            pid = fork("engine", partial(self._serve, engine_class), timeline=self._timeline, reports=self._reports)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if status >= 0:
                return status
            quick_crashes = quick_crashes + 1 if time.monotonic() - started < _QUICK_S else 0
            name = signal.Signals(-status).name
            if quick_crashes >= _MOST_QUICK_CRASHES:
                raise EngineError(
                    f"the engine process was killed by {name} {quick_crashes} times in a row; if this is SIGKILL, "
                    f"memory ran out: expected it to stay within the container's limit"
                )
            logger.error("the engine process was killed by %s; forking a new one", name)

    def _import_engine(self) -> Callable[[Region, Settings, Timeline], Any]:
        if self._settings.engine == "torch":
            from .lean_torch import import_torch

            import_torch(numpy=False)  # nothing in the engine process uses it
            from .models.registry import import_families

            import_families()
        module, _, name = _ENGINES[self._settings.engine].partition(":")
        engine_class: Callable[[Region, Settings, Timeline], Any] = getattr(importlib.import_module(module), name)
        return engine_class

    def _serve(self, engine_class: Callable[[Region, Settings, Timeline], Any], timeline: Timeline) -> int:
        gc.enable()
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        engine: Engine = engine_class(self._region, self._settings, timeline)
        server = EngineServer(self._listener, engine)
        server.start()
        threading.Thread(target=self._announce, args=(engine, server, timeline, stop), daemon=True).start()
        try:
            engine.run(stop)
        finally:
            server.close()
            engine.close()
        return 0

    def _announce(self, engine: Engine, server: EngineServer, timeline: Timeline, stop: threading.Event) -> None:
        try:
            engine.wait_ready()
        except MedusaError as error:
            self._reports.send("engine", error)
            stop.set()
            return
        timeline.mark("ready")
        server.announce_ready()
