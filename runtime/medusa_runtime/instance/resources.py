"""The things that an instance's processes share.

They are made before the forks, so that no process has to wait for another one to make them.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass

from ..config import Settings
from ..engine.client import EngineClient
from ..errors import MedusaError
from ..liveness import Heartbeats
from ..process import ReportPipe
from ..region.reader import Region
from ..timeline import Timeline
from .listeners import private_listener


@dataclass(frozen=True, slots=True)
class InstanceHandle:
    """The function process's part of the instance.

    ``region`` is None without a checkpoint. So is ``engine``, and also if the function builds the model itself
    (``--engine none``).
    """

    settings: Settings
    timeline: Timeline
    engine: EngineClient | None
    region: Region | None
    reports: ReportPipe
    heartbeats: Heartbeats

    def fail(self, error: MedusaError) -> None:
        """End the whole instance with this error."""
        self.reports.send("function", error)


class InstanceResources:
    """The timeline, the reports, the heartbeats and, with a model, its region and the engine's socket.

    ``region`` is set before the first fork that needs it. It is replaced if it is the node agent's and will never be
    complete.
    """

    def __init__(self, settings: Settings, timeline: Timeline, listener: socket.socket) -> None:
        self.settings = settings
        self.timeline = timeline
        self.listener = listener
        self.reports = ReportPipe()
        self.heartbeats = Heartbeats()
        self.region: Region | None = None
        self.engine_listener: socket.socket | None = None
        self._engine: EngineClient | None = None

    def open_engine_socket(self) -> None:
        """Listen for the engine. The function process can connect at once, and the engine accepts when it is up."""
        self.engine_listener, path = private_listener()
        self._engine = EngineClient(path)

    def handle(self) -> InstanceHandle:
        """Return the function process's part."""
        timeline = self.timeline.named("function")
        return InstanceHandle(self.settings, timeline, self._engine, self.region, self.reports, self.heartbeats)

    def close(self) -> None:
        if self.engine_listener is not None:
            self.engine_listener.close()
        if self.region is not None:
            self.region.close()
        self.reports.close()
        self.listener.close()
