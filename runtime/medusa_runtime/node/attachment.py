"""An instance's attachment to its node's agent: a region and an engine process, and what happens if either is lost."""

from __future__ import annotations

import logging
import os
import socket
import time
from enum import Enum

from ..config import NODE_SOCKET, Settings
from ..errors import MedusaError, NodeAwayError, NodeError
from ..process import ReportPipe, hang_up
from ..region.reader import Region
from ..timeline import Timeline
from .client import FEW_WAITS, NodeClient
from .engines.handover import settings_to_body
from .messages import channel_pair

logger = logging.getLogger(__name__)

_AGAIN_AFTER_S = 2.0
_SEALED_WITHIN_S = 5.0  # short, because no process answers probes meanwhile


class Loss(Enum):
    REGION = "region"  # it will not be completed
    ENGINE = "engine"


class Attachment:
    """The region and the engine process that one instance has from the agent.

    After a failure, which is logged once, the instance goes on by itself.
    """

    def __init__(self, client: NodeClient, path: str, settings: Settings, timeline: Timeline) -> None:
        self._client: NodeClient | None = client
        self._path = path
        self._settings = settings
        self._timeline = timeline
        self._lease: socket.socket | None = None
        self._retry_at = 0.0
        self._reported = False
        self.region: Region | None = None

    @classmethod
    def attach(cls, settings: Settings, timeline: Timeline) -> Attachment | None:
        """Get a region whose index and small files can be read; None if there is no agent, or it refuses."""
        path = settings.node_socket or NODE_SOCKET
        assert settings.model is not None
        try:
            with timeline.stage("node") as detail:
                client = NodeClient(path, settings.node_user, waits=FEW_WAITS)
                attachment = cls(client, path, settings, timeline)
                try:
                    attachment.region = client.region(
                        settings.model,
                        background=settings.load_priority == "background",
                        layers=settings.layers,
                        timeout_s=_SEALED_WITHIN_S,
                    )
                    _check_usable(attachment.region, settings)
                except BaseException:
                    client.close()
                    raise
                detail["region"] = attachment.region.progress().state
        except (MedusaError, OSError) as error:
            _log(timeline, error)
            return None
        return attachment

    def take_engine(self, listener: socket.socket, timeline: Timeline, reports: ReportPipe) -> bool:
        """Let a pre-warmed process serve on ``listener``. Return False if the instance must start one of its own."""
        if self._client is None:
            return False
        try:
            mine, theirs = channel_pair()
        except OSError as error:
            self._report(error)
            return False
        try:
            descriptors = (listener.fileno(), timeline.fd, reports.write_fd, theirs.fileno())
            settings, gpus = settings_to_body(self._settings), os.environ.get("CUDA_VISIBLE_DEVICES")
            pid = self._client.engine(self._settings.engine, settings, descriptors, gpus)
        except (MedusaError, OSError) as error:
            mine.close()
            self._report(error)
            return False
        finally:
            theirs.close()
        self._timeline.mark("engine", source="node", pid=pid)
        self._lease = mine
        return True

    @property
    def descriptors(self) -> list[int]:
        """The descriptors to poll for reading. When one is readable, call ``take_losses``."""
        found = [] if self._client is None else [self._client.fileno()]
        return found if self._lease is None else [*found, self._lease.fileno()]

    def take_losses(self, readable: set[int]) -> list[Loss]:
        """Return what was lost since the last call. Also bring the region back to an agent that has been restarted."""
        losses = []
        if self._lease is not None and self._lease.fileno() in readable:
            self._lease.close()
            self._lease = None
            losses.append(Loss.ENGINE)
        if self._client is not None and self._client.has_loss():
            reason = self._client.read_loss()
            if reason is not None:
                self._client.close()
                self._client = None
                self._retry_at = time.monotonic() + _AGAIN_AFTER_S
                if self.region is not None and self.region.progress().state != "done":
                    self._report(NodeError(reason or "the node agent ended while it was fetching"))
                    losses.append(Loss.REGION)
                elif not reason:
                    logger.info("the node agent ended; this function goes on without it")
        elif self._client is None and self.region is not None and time.monotonic() > self._retry_at:
            self._return_region()
        return losses

    def _return_region(self) -> None:
        assert self.region is not None
        assert self._settings.model is not None
        self._retry_at = time.monotonic() + _AGAIN_AFTER_S
        if not os.path.exists(self._path):
            return
        try:
            client = NodeClient(self._path, self._settings.node_user, waits=FEW_WAITS)
            try:
                client.return_region(self._settings.model, self.region.fd)
            except BaseException:
                client.close()
                raise
        except (MedusaError, OSError) as error:
            logger.debug("the node agent takes no region back: %s", error)
            if not isinstance(error, (OSError, NodeAwayError)):
                self._retry_at = float("inf")  # the agent refuses, and would do so again
            return
        self._client = client

    def _report(self, error: Exception) -> None:
        if not self._reported:
            _log(self._timeline, error)
        self._reported = True

    def release_engine(self) -> bool:
        """End the agent's engine process that serves this instance. Return False if there is none."""
        had = self._lease is not None
        if self._lease is not None:
            hang_up(self._lease)  # closing it would not be enough, because forked children hold it, too
            self._lease.close()
            self._lease = None
        return had

    def forget_region(self) -> None:
        """Forget the region, because the instance has another one."""
        self.region = None

    def close(self) -> None:
        self.release_engine()
        if self._client is not None:
            self._client.close()
            self._client = None


def _check_usable(region: Region, settings: Settings) -> None:
    """Raise NodeError for an incomplete region if a handler builds its own module, which cannot change regions."""
    if settings.engine == "none" and region.progress().state != "done":
        region.close()
        raise NodeError("it is still fetching the model; with --engine none expected a complete one")


def _log(timeline: Timeline, error: Exception) -> None:
    logger.warning("starting without the node agent: %s", error)
    timeline.mark("node-fallback", reason=str(error))


__all__ = ["Attachment", "Loss"]
