"""Groups whose workers cannot connect to each other, and send objects through a store (ParaServe §8.5)."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from group_fixtures import Group
from medusa_cluster.group.plan import GroupPlan
from medusa_cluster.group.wire import tunnel
from medusa_cluster.group.wire.channel import Greeting, Listener, TcpChannel, connect
from medusa_cluster.group.wire.mailbox import BoundedMailbox, FolderMailbox, FsspecMailbox, Mailbox
from medusa_cluster.group.wire.message import Kind, Message, json_message
from medusa_cluster.group.wire.tunnel import StoreListener, connect_through_store, is_store_place
from medusa_runtime.errors import ConfigError, EngineError, MissingPackageError
from medusa_runtime.storage.peer_access import PeerAccess
from waiting import until

GROUP = 77


@pytest.fixture(params=["plain", "encrypted"])
def pair(request: pytest.FixtureRequest, place: str) -> Iterator[tuple[TcpChannel, TcpChannel]]:
    files = request.getfixturevalue("certificates") if request.param == "encrypted" else ()
    access = PeerAccess("secret", *files)
    accepted: queue.SimpleQueue[Greeting] = queue.SimpleQueue()
    listener = Listener(place, 0, group=GROUP, access=access, accept=accepted.put, link=None)
    deadline = time.monotonic() + 60
    ours = connect(place, group=GROUP, access=access, rank=3, purpose="steps", deadline=deadline)
    greeting = accepted.get(timeout=60)
    assert (greeting.rank, greeting.purpose) == (3, "steps")
    yield ours, greeting.channel
    ours.close()
    greeting.channel.close()
    listener.close()


def test_messages_pass_through_the_store_in_order_both_ways(pair: tuple[TcpChannel, TcpChannel]) -> None:
    ours, theirs = pair
    body = bytes(range(256)) * 65536  # 16 MB, more than an object
    for channel in (ours, theirs):
        channel.send(Message(Kind.BLOCK, GROUP, rows=1, body=body))
        channel.send(json_message(Kind.RELEASE, GROUP, {"as": "end"}))
    for channel in (ours, theirs):
        found = [channel.receive(), channel.receive()]
        assert [one and one.kind for one in found] == [Kind.BLOCK, Kind.RELEASE]
        assert found[0] is not None
        assert found[0].body == body


def test_each_side_sees_that_the_other_has_closed(pair: tuple[TcpChannel, TcpChannel]) -> None:
    ours, theirs = pair
    theirs.send(json_message(Kind.RELEASE, GROUP, {}))
    theirs.flush(5.0)
    theirs.close()
    assert (last := ours.receive()) is not None
    assert last.kind is Kind.RELEASE
    assert ours.receive() is None


def test_strangers_are_refused(place: str) -> None:
    accepted: list[Greeting] = []
    listener = Listener(place, 0, group=GROUP, access=PeerAccess("right"), accept=accepted.append, link=None)
    deadline = time.monotonic() + 0.5
    with pytest.raises(EngineError, match="could not be reached"):
        connect(place, group=GROUP, access=PeerAccess("wrong"), rank=1, purpose="steps", deadline=deadline)
    listener.close()
    assert accepted == []


def test_only_names_of_connections_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "way-out").symlink_to(tmp_path / "outside")
    box = FolderMailbox(shared)
    for name in ("way-out", "calls", "0" * 17):
        box.put(f"calls/{name}", b"")
    listener = StoreListener(str(shared))
    ours = connect_through_store(str(shared))
    theirs, _ = listener.accept()
    ours.sendall(b"x")
    assert theirs.recv(1) == b"x"
    listener.close()
    with pytest.raises(OSError, match="closed"):
        listener.accept()
    assert sorted(box.names("calls")) == ["0" * 17, "calls", "way-out"]
    for one in (ours, theirs):
        one.close()


def test_objects_are_taken_away_and_few_wait_for_a_slow_reader(tmp_path: Path) -> None:
    def objects() -> int:
        return sum(len(files) for _, _, files in os.walk(tmp_path))  # also while folders are removed

    def send() -> None:
        for _ in range(600):
            ours.sendall(b"x" * 1000)
            time.sleep(0.002)  # longer than a piece waits for more

    listener = StoreListener(str(tmp_path))
    ours = connect_through_store(str(tmp_path))
    theirs, _ = listener.accept()
    sender = threading.Thread(target=send)
    sender.start()
    until(lambda: objects() >= 64)
    time.sleep(0.5)
    assert objects() <= 2 * 64
    left = 600_000
    while left:
        left -= len(theirs.recv(left))
    sender.join()
    ours.close()
    assert theirs.recv(1) == b""
    theirs.close()
    until(lambda: not objects())
    listener.close()
    with pytest.raises(OSError, match="closed"):
        listener.accept()


def test_a_connection_ends_if_the_other_side_takes_nothing_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def threads() -> list[str]:
        return [one.name for one in threading.enumerate() if one.name in ("group-put", "group-take")]

    def send() -> None:
        while True:
            ours.sendall(b"x" * 1000)
            time.sleep(0.002)  # longer than a piece waits for more

    until(lambda: not threads())
    monkeypatch.setattr(tunnel, "_GONE_S", 0.1)
    ours = connect_through_store(str(tmp_path))  # nobody listens
    with pytest.raises(OSError, match="Broken pipe"):
        send()
    ours.close()
    until(lambda: not threads())


def test_a_stranger_s_file_breaks_a_connection_and_is_not_read_for_ever(tmp_path: Path) -> None:
    box = FolderMailbox(tmp_path)
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for name in ("large", "pipe", "link"):
        with pytest.raises(EngineError, match=name):
            box.get(name)


def test_other_users_cannot_read_objects(tmp_path: Path) -> None:
    FolderMailbox(tmp_path).put("a/1", b"one")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o700


def test_half_an_object_is_not_left_behind(tmp_path: Path) -> None:
    (tmp_path / "a" / "1").mkdir(parents=True)  # so that it cannot be written
    with pytest.raises(EngineError, match="could not be written"):
        FolderMailbox(tmp_path).put("a/1", b"one")
    assert os.listdir(tmp_path / "a") == ["1"]


def test_a_mailbox_shows_whole_objects_or_none(place: str) -> None:
    box: Mailbox = BoundedMailbox(place)
    assert (box.get("a/1"), box.has("a/1"), box.names("a")) == (None, False, [])
    box.put("a/1", b"one")
    box.put("a/2", b"two")
    box.put("b/3", b"three")
    assert (box.get("a/1"), box.get("a/2"), sorted(box.names("a"))) == (b"one", b"two", ["1", "2"])
    assert sorted(box.names("")) == ["a", "b"]
    assert box.has("a/2")
    box.delete("a/1")
    box.delete("a/1")
    assert (box.get("a/1"), box.names("a")) == (None, ["2"])
    for _ in range(2):
        box.clear("a")
        assert (box.names("a"), box.names("")) == ([], ["b"])


def test_places_in_stores_and_bad_ones(tmp_path: Path) -> None:
    assert [is_store_place(one) for one in ("/mnt/x", "s3://b/x", "10.0.0.1:80", "[::1]:80")] == [
        True,
        True,
        False,
        False,
    ]
    assert isinstance(BoundedMailbox(f"file://{tmp_path}")._inner, FolderMailbox)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(EngineError, match="could not be written"):
        connect_through_store(str(tmp_path / "file"))
    pytest.importorskip("fsspec")
    assert isinstance(BoundedMailbox("memory://x")._inner, FsspecMailbox)
    with pytest.raises(MissingPackageError, match="cannot be written to"):
        BoundedMailbox("no-such-store://x")
    plan = {"group": "g", "token": "t", "rank": 1, "size": 2, "leader": "/mnt/g/"}
    assert GroupPlan.parse(plan).leader_address == ("/mnt/g/0", 0)
    assert GroupPlan.parse(plan).store_place(1) == "/mnt/g/1"
    with pytest.raises(ConfigError, match="mode: expected pipeline, through a store"):
        GroupPlan.parse({**plan, "mode": "live"})
    with pytest.raises(ConfigError, match="leader: expected HOST:PORT, or a folder in a store, found 'nowhere'"):
        GroupPlan.parse({**plan, "leader": "nowhere"})


def test_a_group_without_connections_writes_what_one_engine_writes(
    tmp_path: Path, group: Callable[..., Group], serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError("no function can connect to another one")

    expected = serve().ask("Tokens flow from storage", max_tokens=20, temperature=1.0, seed=9).wait()
    made = group("0:1", "1:2", "2:4", leader=str(tmp_path / "shared"))
    monkeypatch.setattr(socket, "create_connection", refused)
    monkeypatch.setattr(socket, "create_server", refused)
    made.start()
    made.wait_full()
    answer = made.leader.ask("Tokens flow from storage", max_tokens=20, temperature=1.0, seed=9)
    until(lambda: answer.tokens)
    made.leader.engine.consolidate()  # keys and values come through the store, too
    assert answer.wait().text == expected.text
    until(lambda: not made.formed)
    stages = {stage.name for stage in made.leader.timeline.stages()}
    assert "consolidated" in stages


def test_a_lost_worker_is_noticed(tmp_path: Path, group: Callable[..., Group]) -> None:
    made = group("0:2", "2:4", leader=str(tmp_path / "shared")).start()
    made.wait_full()
    made.workers[1].close()
    assert made.leader.ask("A", max_tokens=8).wait().tokens
    until(lambda: not made.formed)
