"""Workers of a group with certificates: mutual TLS, and nobody without a certificate of the cluster's CA."""

from __future__ import annotations

import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from group_fixtures import FILES, Group
from medusa_cluster.group.plan import GroupPlan
from medusa_cluster.group.wire.channel import Greeting, Listener, TcpChannel, connect
from medusa_cluster.group.wire.message import Kind, Message, json_message
from medusa_cluster.node.group_worker import GroupWorker
from medusa_cluster.node.settings import TlsFiles
from medusa_runtime.errors import ConfigError, EngineError
from medusa_runtime.storage.peer_access import PeerAccess
from waiting import until

GROUP, TOKEN = 7, "the group's secret"
PROMPT = "Tokens flow from storage to memory, and from memory to layers. "


class Door:
    """A listener, and who was let in."""

    def __init__(self, *files: str) -> None:
        self.let_in: queue.SimpleQueue[Greeting] = queue.SimpleQueue()
        access = PeerAccess(TOKEN, *files)
        self.listener = Listener("127.0.0.1", 0, group=GROUP, access=access, accept=self.let_in.put, link=None)

    def enter(self, *files: str, port: int | None = None, within_s: float = 60) -> TcpChannel:
        return connect(
            f"127.0.0.1:{port or self.listener.port}", group=GROUP, access=PeerAccess(TOKEN, *files), rank=1,
            purpose="steps", deadline=time.monotonic() + within_s,
        )  # fmt: skip


@pytest.fixture
def door(certificates: tuple[str, str, str]) -> Iterator[Door]:
    made = Door(*certificates)
    yield made
    made.listener.close()


class Tap:
    """A relay before a listener that keeps what passes."""

    def __init__(self, port: int) -> None:
        self._to, self.seen = port, bytearray()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with self._socket, self._socket.accept()[0] as one, socket.create_connection(("127.0.0.1", self._to)) as other:
            to = {one: other, other: one}
            while True:
                for ready in select.select(list(to), (), ())[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    self.seen += data
                    to[ready].sendall(data)

    def end(self) -> bytes:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return bytes(self.seen)


def test_who_listens_on_the_way_reads_nothing(door: Door, certificates: tuple[str, str, str]) -> None:
    plain = Door()
    body = b"keys and values " * 4096
    for listening, files, readable in ((plain, (), True), (door, certificates, False)):
        tap = Tap(listening.listener.port)
        ours = listening.enter(*files, port=tap.port)
        theirs = listening.let_in.get(timeout=60).channel
        ours.send(Message(Kind.BLOCK, GROUP, body=body))
        assert bytes(theirs.receive().body) == body  # type: ignore[union-attr]
        ours.close()
        theirs.close()
        seen = tap.end()
        assert len(seen) > len(body)
        assert (body[:64] in seen) is readable
        assert (b"steps" in seen) is readable
    plain.listener.close()


def test_many_threads_send_while_one_reads(door: Door, certificates: tuple[str, str, str]) -> None:
    ours = door.enter(*certificates)
    theirs = door.let_in.get(timeout=60).channel
    sizes = [1, 100, 16 << 10, 300_000]

    def send(channel: TcpChannel, number: int) -> None:
        for turn in range(40):
            channel.send(Message(Kind.BLOCK, GROUP, step=number, body=bytes([turn]) * sizes[(turn + number) % 4]))

    found: dict[int, list[Message]] = {0: [], 1: []}

    def receive(side: int, channel: TcpChannel) -> None:
        while len(found[side]) < 120 and (message := channel.receive()) is not None:
            found[side].append(message)

    threads = [threading.Thread(target=send, args=(c, n)) for c in (ours, theirs) for n in range(3)]
    threads += [threading.Thread(target=receive, args=pair) for pair in enumerate((ours, theirs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    for messages in found.values():
        for number in range(3):
            bodies = [bytes(message.body) for message in messages if message.step == number]
            assert bodies == [bytes([turn]) * sizes[(turn + number) % 4] for turn in range(40)]
    ours.close()
    assert theirs.receive() is None
    theirs.close()


@pytest.mark.parametrize(
    ("there", "here", "said_here", "said_there"),
    [
        ("ours", "theirs", "its certificate is not from the cluster's CA", "does not accept this worker's certificate"),
        ("old", "olds", "its certificate has expired, by the clock of this machine", "does not accept this worker's"),
        ("ours", "none", "it expects TLS: start this node with", "does not speak TLS"),
        ("none", "ours", "it does not speak TLS, which this worker's certificates ask for", "found something else"),
    ],
)
def test_those_that_do_not_fit_are_refused_with_one_reason(
    there: str, here: str, said_here: str, said_there: str, request: pytest.FixtureRequest, caplog: Any
) -> None:
    files = {"none": (), "ours": request.getfixturevalue("certificates")}
    files["theirs"] = request.getfixturevalue("other_certificates")
    files["old"] = request.getfixturevalue("old_certificates")
    files["olds"] = (files["old"][0], *files["ours"][1:])  # it knows their CA
    door = Door(*files[there])
    with pytest.raises(EngineError, match=f"could not be reached at .* in time: {said_here}"):
        door.enter(*files[here], within_s=1.5)
    assert door.let_in.empty()
    until(lambda: len(caplog.records) == 1)
    assert said_there in caplog.text
    door.listener.close()


def test_a_worker_that_knows_the_ca_needs_a_certificate_and_the_token(
    door: Door, certificates: tuple[str, str, str], other_certificates: tuple[str, str, str]
) -> None:
    ca, *_ = certificates
    _, other_certificate, other_key = other_certificates
    with pytest.raises(EngineError, match=r"does not accept this worker's certificate"):
        door.enter(ca, other_certificate, other_key, within_s=0.5)
    with pytest.raises(EngineError, match="could not be reached"):
        connect(
            f"127.0.0.1:{door.listener.port}", group=GROUP, access=PeerAccess("another token", *certificates), rank=1,
            purpose="steps", deadline=time.monotonic() + 0.5,
        )  # fmt: skip
    assert door.let_in.empty()
    ours = door.enter(*certificates)
    door.let_in.get(timeout=60).channel.close()
    ours.close()


def test_half_a_handshake_holds_nobody_up(door: Door, certificates: tuple[str, str, str]) -> None:
    strangers = [socket.create_connection(("127.0.0.1", door.listener.port)) for _ in range(100)]
    for number, stranger in enumerate(strangers):
        stranger.sendall(b"\x16\x03\x01\x40\x00"[: 1 + number % 5])
    ours = door.enter(*certificates)
    theirs = door.let_in.get(timeout=60).channel
    ours.send(json_message(Kind.HEARTBEAT, GROUP, {"n": 1}))
    assert theirs.receive().values() == {"n": 1}  # type: ignore[union-attr]
    for connection in (ours, theirs, *strangers):
        connection.close()


def test_a_connection_that_is_damaged_on_the_way_ends(door: Door, certificates: tuple[str, str, str]) -> None:
    ours = door.enter(*certificates)
    theirs = door.let_in.get(timeout=60).channel
    ours._socket.sendall(b"\x17\x03\x03\x00\x20" + bytes(32))  # a record that nobody has encrypted
    assert theirs.receive() is None
    # Each version of OpenSSL has other words for it.
    assert str(theirs.refusal).startswith(("TLS failed (", "it does not speak TLS"))
    with pytest.raises(EngineError, match="connection to another worker of the group"):
        theirs.send(json_message(Kind.HEARTBEAT, GROUP, {"n": 1}))
    ours.close()
    theirs.close()


@pytest.mark.parametrize("settings", [{"then": "down"}, {"then": "stay", "mode": "disaggregated"}])
def test_a_group_with_certificates_gives_the_same_tokens(
    settings: dict[str, str], certificates: tuple[str, str, str], group: Callable[..., Group], serve: Any
) -> None:
    expected = serve().ask(PROMPT, max_tokens=24).tokens
    layers = (None, None) if "mode" in settings else ("0:2", "2:4")
    made = group(*layers, **settings, **dict(zip(FILES, certificates, strict=True))).start()
    assert made.leader.ask(PROMPT, max_tokens=24).tokens == expected


def test_a_worker_without_certificates_forms_no_group(
    certificates: tuple[str, str, str], group: Callable[..., Group], caplog: Any
) -> None:
    made = group("0:2", "2:4", form_s=2.0, **dict(zip(FILES, certificates, strict=True)))
    made.add(0)
    made.add(1, **dict.fromkeys(FILES))
    assert made.leader.ask("A").last.finish_reason == "length"
    assert "does not speak TLS" in caplog.text
    until(lambda: "it expects TLS: start this node with" in caplog.text)  # its own time to form ends later


def test_a_node_gives_its_workers_its_own_certificates(certificates: tuple[str, str, str], tmp_path: Any) -> None:
    ca, certificate, key = certificates
    found = {"group": "g", "token": "t", "rank": 0, "size": 2, "leader": "h:80", "layers": "0:2", "ca_file": "/etc/x"}
    tls = TlsFiles(certificate=tmp_path / certificate, key=tmp_path / key, authority=tmp_path / ca)
    access = GroupWorker.from_json(found, "127.0.0.1", tls).plan.access
    assert (access.ca_file, access.cert_file, access.key_file) == certificates
    assert not GroupWorker.from_json(found, "127.0.0.1").plan.access.tls
    with pytest.raises(ConfigError, match="all three or none"):
        GroupPlan.parse({key: value for key, value in found.items() if key != "layers"}, "x")
