"""The membership of a worker that is not the leader: it joins, serves, and joins again when the leader was replaced."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from medusa_runtime.errors import EngineError

from .plan import GroupPlan
from .wire.channel import TcpChannel
from .wire.message import Message

logger = logging.getLogger(__name__)

_POLL_S = 0.2


class GroupLostError(EngineError):
    """The group was lost without having been dissolved."""


def check_leader(leader: TcpChannel, plan: GroupPlan) -> None:
    """Raise GroupLostError if the leader has been silent for too long."""
    if time.monotonic() - leader.last_received_at > plan.silent_s:
        raise GroupLostError(f"the leader of the group has been silent for {plan.silent_s:g} s")


def outcome_of(release: Message, plan: GroupPlan) -> str:
    """Return what a worker becomes by the leader's last message: ``end`` or ``instance``."""
    return "instance" if release.values().get("as") == "instance" and plan.full else "end"


class Session(Protocol):
    """One membership, from the greeting to the end of the connection to the leader."""

    joined: bool

    def run(self, deadline: float) -> str:
        """Serve until the group is dissolved, and return what this worker becomes: ``end`` or ``instance``.

        ``deadline``: when the worker must have joined, in seconds of the monotonic clock. Raises GroupLostError.
        """

    def close(self) -> None: ...


def serve_group(begin: Callable[[], Session], plan: GroupPlan, stop: threading.Event) -> str:
    """Serve until the group is dissolved, and return what this worker becomes: ``end`` or ``instance``.

    ``begin`` makes a new session for each attempt to join. When the group is lost for good, a worker with room for all
    layers becomes an instance, and other workers raise GroupLostError.
    """
    deadline = time.monotonic() + plan.form_s
    while True:
        session = begin()
        try:
            return session.run(deadline)
        except GroupLostError as error:
            if not session.joined and time.monotonic() > deadline:
                if not plan.full:
                    raise
                logger.error("%s; this worker becomes an instance", error)  # noqa: TRY400
                return "instance"
            logger.warning("%s; joining again", error)
        finally:
            session.close()
        if stop.is_set():
            return "end"
        if session.joined:
            deadline = time.monotonic() + plan.form_s
        stop.wait(_POLL_S)


__all__ = ["GroupLostError", "Session", "check_leader", "outcome_of", "serve_group"]
