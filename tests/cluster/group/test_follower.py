"""A worker whose leader, played by the test, dissolves the group while the worker still connects to the next one."""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
from group_fixtures import Group
from medusa_cluster.group import follower
from medusa_cluster.group.wire.channel import Greeting, Listener, connect
from medusa_cluster.group.wire.message import Kind, json_message
from medusa_runtime.storage.peer_access import PeerAccess
from waiting import until

from benchmarks.ports import free_port

ACCESS = PeerAccess("secret")


class Forming:
    """Worker 1 of a group of three, which the next worker keeps waiting for the handshake, until ``next_answers``."""

    def __init__(self, stack: ExitStack, group: Callable[..., Group]) -> None:
        greetings: queue.SimpleQueue[Greeting] = queue.SimpleQueue()
        port = free_port()
        self.stack = stack
        self.others = set(threading.enumerate())
        self.worker = group("0:1", "1:2", "2:4", leader=f"127.0.0.1:{port}").add(1)
        self.number = self.worker.engine.plan.number  # type: ignore[attr-defined]
        self.listen(port, greetings.put)
        greeting = greetings.get(timeout=240)
        self.leader, self.address = greeting.channel, str(greeting.values["place"])
        stack.callback(self.leader.close)
        self.next = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.send(Kind.FORM, {"next": f"127.0.0.1:{self.next.getsockname()[1]}"})
        self.waiting = stack.enter_context(self.next.accept()[0])

    def listen(self, port: int, accept: Callable[[Greeting], None]) -> None:
        listener = Listener("127.0.0.1", port, group=self.number, access=ACCESS, accept=accept, link=None)
        self.stack.callback(listener.close)

    def send(self, kind: Kind, values: dict[str, Any]) -> None:
        self.leader.send(json_message(kind, self.number, values))

    def dissolve(self) -> None:
        """Release the worker as the leader, go at once, and wait until the worker has noticed."""
        self.send(Kind.RELEASE, {"as": "instance"})
        # From the reset on, the worker can send it nothing more.
        self.leader._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.leader.close()
        until(lambda: not self.threads("group-steps"))

    def previous_goes(self) -> None:
        """Connect as the worker before this one, go, and wait until this one has noticed."""
        deadline = time.monotonic() + 240
        previous = connect(self.address, group=self.number, access=ACCESS, rank=0, purpose="hidden", deadline=deadline)
        until(lambda: self.threads("group-hidden"))
        previous.close()
        until(lambda: not self.threads("group-hidden"))

    def threads(self, name: str) -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name == name and one not in self.others]

    def next_answers(self) -> None:
        """Let the next worker take connections, and end the one that waits."""
        port = self.next.getsockname()[1]
        self.next.close()
        self.listen(port, lambda _: None)
        self.waiting.close()

    def becomes_an_instance(self) -> None:
        """Wait until the worker is one, and see it answer."""
        until(lambda: self.worker.engine.released is not None or self.worker.errors)  # type: ignore[attr-defined]
        assert self.worker.errors == []
        assert self.worker.engine.released == "instance"  # type: ignore[attr-defined]
        assert self.worker.ask("A").last.finish_reason == "length"


@pytest.fixture
def forming(group: Callable[..., Group]) -> Iterator[Forming]:
    with ExitStack() as stack:
        yield Forming(stack, group)


def test_a_worker_is_released_when_the_next_one_has_gone(forming: Forming) -> None:
    forming.dissolve()
    forming.next.close()
    forming.waiting.close()
    forming.becomes_an_instance()


def test_a_worker_is_released_by_a_leader_that_waits_for_no_answer(forming: Forming) -> None:
    forming.dissolve()
    forming.next_answers()
    forming.becomes_an_instance()


def test_a_worker_is_released_after_the_one_before_it_has_gone(forming: Forming) -> None:
    forming.previous_goes()
    forming.dissolve()
    forming.next_answers()
    forming.becomes_an_instance()


def test_a_release_is_read_by_a_worker_to_which_the_leader_has_seemed_silent(
    group: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that stood still may look at the clock before another of its threads has read what came meanwhile."""
    monkeypatch.setattr(follower, "_GRACE_S", 60.0)
    greetings: queue.SimpleQueue[Greeting] = queue.SimpleQueue()
    port = free_port()
    worker = group("0:2", "2:4", leader=f"127.0.0.1:{port}", silent_s=0.5).add(1)
    engine: Any = worker.engine
    listener = Listener("127.0.0.1", port, group=engine.plan.number, access=ACCESS, accept=greetings.put, link=None)
    with closing(listener), closing(greetings.get(timeout=240).channel) as leader:
        leader.send(json_message(Kind.FORM, engine.plan.number, {"next": None}))
        time.sleep(2.0)
        leader.send(json_message(Kind.RELEASE, engine.plan.number, {"as": "instance"}))
        until(lambda: engine.released is not None or worker.errors)
        assert (engine.released, worker.errors) == ("instance", [])
        assert greetings.empty()  # it has not joined again
