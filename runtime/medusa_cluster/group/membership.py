"""The membership of a worker that is not the leader: its connections, and what it tells the leader of itself.

It joins, serves, and joins again when the leader was replaced.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from medusa_runtime.errors import EngineError
from medusa_runtime.timeline import Timeline

from .fetch_throttle import FetchThrottle
from .identity import Heartbeats
from .plan import GroupPlan
from .wire.channel import Greeting, Listener, TcpChannel, connect
from .wire.emulated_link import EmulatedLink
from .wire.message import Kind, Message, json_message

logger = logging.getLogger(__name__)

_POLL_S = 0.2


class Member:
    """A listener and connections, from the greeting to ``close``.

    ``accept`` is given each worker that connects. ``throttle`` learns whether all of the group's layers are loaded.
    """

    def __init__(
        self,
        plan: GroupPlan,
        timeline: Timeline,
        link: EmulatedLink | None,
        *,
        stopped: Callable[[], bool],
        accept: Callable[[Greeting], None],
        throttle: FetchThrottle | None,
    ) -> None:
        self.leader: TcpChannel | None = None
        self.stages_sent = 0  # how many stages of the timeline the leader has
        self._plan, self._timeline, self._link = plan, timeline, link
        self._stopped, self._accept, self._throttle = stopped, accept, throttle
        self._channels: list[TcpChannel] = []
        self._heartbeats: Heartbeats | None = None
        self._echo: tuple[int, int] | None = None  # the leader's latest clock, and this worker's when it arrived
        self._place = plan.store_place(plan.rank)
        host = self._place or plan.bind
        self._listener = Listener(host, 0, group=plan.number, access=plan.access, accept=self._accepted, link=link)

    def join(self, deadline: float, identity: Mapping[str, Any], state: Callable[[], dict[str, Any]]) -> TcpChannel:
        """Connect to the leader, and begin to send it heartbeats with what ``state`` returns.

        ``deadline`` is in seconds of the monotonic clock. Raises EngineError.
        """
        place = self._place or f"{self._plan.bind}:{self._listener.port}"
        leader = self.leader = self._connect(
            self._plan.leader_place, "steps", deadline, self._stopped, place=place, **identity
        )
        self._heartbeats = Heartbeats(
            self._plan.number, self._plan.rank, leader.send, lambda: {**state(), "echo": self._echo}
        )
        return leader

    def connect_next(self, address: str, leader_done: Callable[[], bool]) -> TcpChannel:
        """Connect to the worker of the next layers. Raises EngineError, also when the leader has ended the group."""
        deadline = time.monotonic() + self._plan.silent_s
        return self._connect(address, "hidden", deadline, lambda: self._stopped() or leader_done())

    def note_heartbeat(self, message: Message) -> None:
        """Note a heartbeat of the leader's. Raises TypeError, ValueError or OverflowError if it is malformed."""
        values = message.values()
        self._echo = int(values.get("sent", 0)), time.monotonic_ns()
        if self._throttle is not None:
            self._throttle.group_loaded = bool(values.get("served"))

    def send_timeline(self) -> None:
        """Send the leader the stages of this process that it does not have yet."""
        assert self.leader is not None
        stages = self._timeline.stages()
        new, self.stages_sent = stages[self.stages_sent :], len(stages)
        self.leader.send(json_message(Kind.STAGES, self._plan.number, {"stages": new}, rank=self._plan.rank))

    def close(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.close()
        self._listener.close()
        for channel in self._channels:
            channel.close()

    def _connect(
        self, address: str, purpose: str, deadline: float, stopped: Callable[[], bool], **more: Any
    ) -> TcpChannel:
        plan = self._plan
        channel = connect(
            address, group=plan.number, access=plan.access, rank=plan.rank, purpose=purpose, deadline=deadline,
            stopped=stopped, link=self._link, **more,
        )  # fmt: skip
        self._channels.append(channel)
        return channel

    def _accepted(self, greeting: Greeting) -> None:
        self._channels.append(greeting.channel)
        self._accept(greeting)


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


__all__ = ["GroupLostError", "Member", "Session", "check_leader", "outcome_of", "serve_group"]
