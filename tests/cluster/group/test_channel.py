"""The channels of a group: what is sent arrives, what is no message is refused, and nobody waits for a slow reader."""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from medusa_cluster.group.wire.channel import Greeting, Listener, TcpChannel, connect
from medusa_cluster.group.wire.emulated_link import EmulatedLink
from medusa_cluster.group.wire.message import HEADER_BYTES, Kind, Message, hidden_states, json_message, parse_header
from medusa_runtime.errors import EngineError
from medusa_runtime.storage.peer_access import PeerAccess

GROUP = 77


@pytest.fixture(params=["plain", "encrypted"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[TcpChannel, TcpChannel]]:
    files = request.getfixturevalue("certificates") if request.param == "encrypted" else ()
    access = PeerAccess("secret", *files)
    accepted: queue.SimpleQueue[Greeting] = queue.SimpleQueue()
    listener = Listener("127.0.0.1", 0, group=GROUP, access=access, accept=accepted.put, link=None)
    ours = connected(listener, access)
    greeting = accepted.get(timeout=240)
    assert (greeting.rank, greeting.purpose, greeting.values["dtype"]) == (3, "steps", "bfloat16")
    yield ours, greeting.channel
    ours.close()
    greeting.channel.close()
    listener.close()


def connected(listener: Listener, access: PeerAccess, **options: Any) -> TcpChannel:
    given = {"deadline": time.monotonic() + 60, **options}
    return connect(
        f"127.0.0.1:{listener.port}", group=GROUP, access=access, rank=3, purpose="steps", dtype="bfloat16", **given
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_hidden_states_arrive_bit_by_bit(pair: Any, dtype: torch.dtype) -> None:
    ours, theirs = pair
    sent = torch.randn(513, 65).to(dtype)
    ours.send(hidden_states(GROUP, 9, 1, sent[::3]))
    found = theirs.receive()
    assert (found.kind, found.group, found.step, found.rank) == (Kind.HIDDEN, GROUP, 9, 1)
    assert torch.equal(found.tensor(), sent[::3])


def test_both_ends_may_send_much_before_they_read(pair: Any) -> None:
    ours, theirs = pair
    body = bytes(range(256)) * 65536
    for channel in (ours, theirs):
        channel.send(Message(Kind.BLOCK, GROUP, body=body))
        channel.send(json_message(Kind.HEARTBEAT, GROUP, {"n": 1}))
    for channel in (ours, theirs):
        assert bytes(channel.receive().body) == body
        assert channel.receive().values() == {"n": 1}


def test_the_end_of_a_peer_is_seen_by_reader_and_sender(pair: Any) -> None:
    ours, theirs = pair
    theirs.close()
    assert ours.receive() is None

    def send() -> None:
        for _ in range(1000):
            ours.send(Message(Kind.BLOCK, GROUP, body=bytes(1 << 16)))
            time.sleep(0.001)

    with pytest.raises(EngineError, match=r"the connection to another worker of the group (broke|is broken)"):
        send()


def test_a_wrong_token_is_refused() -> None:
    accepted: queue.SimpleQueue[Greeting] = queue.SimpleQueue()
    listener = Listener("127.0.0.1", 0, group=GROUP, access=PeerAccess("secret"), accept=accepted.put, link=None)
    with pytest.raises(EngineError, match="could not be reached"):
        connected(listener, PeerAccess("wrong"), deadline=time.monotonic() + 0.2)
    assert accepted.empty()
    listener.close()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n".ljust(HEADER_BYTES), "found something else"),
        (struct.pack("<4sB", b"MGRP", 9).ljust(HEADER_BYTES, b"\0"), "expected version 2"),
        (struct.pack("<4sBB", b"MGRP", 2, 99).ljust(HEADER_BYTES, b"\0"), "known kind"),
        (Message(Kind.BLOCK, 1).header()[:-8] + struct.pack("<Q", 1 << 40), "at most"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        parse_header(data)
    accepted: queue.SimpleQueue[Greeting] = queue.SimpleQueue()
    listener = Listener("127.0.0.1", 0, group=GROUP, access=PeerAccess("secret"), accept=accepted.put, link=None)
    with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
        stranger.sendall(data)
        while stranger.recv(4096):  # the challenge, then the end
            pass
    assert accepted.empty()
    listener.close()


def test_a_worker_without_room_for_a_thread_takes_peers_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its accepting thread once ended, so that no peer was ever taken again."""
    accepted: queue.SimpleQueue[Greeting] = queue.SimpleQueue()
    access = PeerAccess("secret")
    listener = Listener("127.0.0.1", 0, group=GROUP, access=access, accept=accepted.put, link=None)
    start = threading.Thread.start

    def start_no_greeting(thread: threading.Thread) -> None:
        if thread.name == "group-greet":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start_no_greeting)
        with socket.create_connection(("127.0.0.1", listener.port), 60) as refused:
            assert not refused.recv(1)
    ours = connected(listener, access)
    accepted.get(timeout=240).channel.close()
    ours.close()
    listener.close()


def test_hidden_states_of_another_size_are_refused() -> None:
    message = hidden_states(GROUP, 1, 0, torch.zeros(2, 4))
    for wrong in (message._replace(rows=3), message._replace(dtype=0), message._replace(dtype=9)):
        with pytest.raises(EngineError, match="expected hidden states"):
            wrong.tensor()


def test_nobody_is_there() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(EngineError, match="could not be reached"):
        connect(
            f"127.0.0.1:{port}",
            group=1,
            access=PeerAccess(""),
            rank=0,
            purpose="steps",
            deadline=time.monotonic() + 0.2,
        )


def test_an_emulated_link_slows_what_is_sent() -> None:
    accepted: queue.SimpleQueue[Greeting] = queue.SimpleQueue()
    listener = Listener("127.0.0.1", 0, group=GROUP, access=PeerAccess("secret"), accept=accepted.put, link=None)
    ours = connected(listener, PeerAccess("secret"), link=EmulatedLink(10e6))
    theirs = accepted.get(timeout=240).channel
    began = time.monotonic()
    ours.send(Message(Kind.BLOCK, GROUP, body=bytes(2_000_000)))
    reader = threading.Thread(target=theirs.receive)
    reader.start()
    reader.join()
    assert time.monotonic() - began > 0.15
    ours.close()
    theirs.close()
    listener.close()
