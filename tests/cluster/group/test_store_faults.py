"""A store that hangs, and what refused, failed and killed workers leave in it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hanging_files import HangingFiles
from medusa_cluster.group.wire import mailbox, tunnel
from medusa_cluster.group.wire.channel import Listener, connect
from medusa_cluster.group.wire.mailbox import LARGEST_OBJECT_BYTES, BoundedMailbox, FsspecMailbox
from medusa_cluster.group.wire.tunnel import StoreListener, connect_through_store
from medusa_runtime.errors import EngineError
from medusa_runtime.storage.peer_access import PeerAccess
from waiting import until

GROUP = 77
TOKEN = PeerAccess("secret")
NEEDS_FUSE = pytest.mark.skipif(
    os.getuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"
)


def left(place: str) -> list[str]:
    """Return what there is in a place: calls, and folders of connections."""
    box = BoundedMailbox(place)
    return [name for name in box.names("") if name != "calls"] + box.names("calls")


def pair(place: str) -> tuple[StoreListener, socket.socket, socket.socket]:
    listener = StoreListener(place)
    ours = connect_through_store(place)
    theirs, _ = listener.accept()
    ours.sendall(b"x")
    assert theirs.recv(1) == b"x"
    return listener, ours, theirs


def kill_a_worker(place: str) -> None:
    """Let a process connect to this place and send three objects, and kill it."""
    code = (
        "import sys, time\n"
        "from medusa_cluster.group.wire.tunnel import connect_through_store\n"
        "ours = connect_through_store(sys.argv[1])\n"
        "for _ in range(3):\n"
        "    ours.sendall(b'abc')\n"
        "    time.sleep(0.1)\n"
        "time.sleep(600)\n"
    )
    box = BoundedMailbox(place)
    process = subprocess.Popen([sys.executable, "-c", code, place])
    until(lambda: [name for name in box.names("") if name != "calls" and len(box.names(name)) == 3])
    process.kill()
    process.wait()


def test_a_refused_connection_leaves_nothing(place: str) -> None:
    listener = Listener(place, 0, group=GROUP, access=PeerAccess("right"), accept=lambda _: None, link=None)
    with pytest.raises(EngineError, match="could not be reached"):
        connect(
            place, group=GROUP, access=PeerAccess("wrong"), rank=1, purpose="steps", deadline=time.monotonic() + 0.3
        )
    until(lambda: not left(place))
    listener.close()


def test_a_call_that_nobody_takes_is_removed_without_waiting(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "_GONE_S", 1000.0)
    ours = connect_through_store(place)
    ours.sendall(b"abc")
    until(lambda: len(left(place)) == 2)
    ours.close()
    until(lambda: not left(place))


def test_what_a_killed_worker_has_sent_is_removed_by_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "_GONE_S", 1.0)
    listener = StoreListener(str(tmp_path))
    kill_a_worker(str(tmp_path))
    theirs, _ = listener.accept()
    assert theirs.recv(3) == b"abc"
    theirs.sendall(b"nobody takes this")
    theirs.close()
    until(lambda: not left(str(tmp_path)))
    listener.close()


def test_what_two_killed_workers_have_left_is_removed_by_who_comes_next(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if place.startswith("memory:"):
        pytest.skip("each process has a memory of its own")
    monkeypatch.setattr(tunnel, "_LEFT_S", 2.0)
    kill_a_worker(place)
    box = BoundedMailbox(place)
    for call in box.names("calls"):
        box.delete(f"calls/{call}")  # as the other one had, before it was killed
    box.put("another/object", b"not of a connection")
    assert len(left(place)) == 2
    listener, ours, theirs = pair(place)
    until(lambda: not any(box.names(name) for name in left(place) if name != "another"))
    ours.sendall(b"y")
    assert theirs.recv(1) == b"y"
    ours.close()
    until(lambda: left(place) == ["another"])
    for one in (theirs, listener):
        one.close()


def test_a_connection_that_is_idle_costs_few_calls_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tunnel, "_IDLE_PART", 1)  # soon after the last object, not after half a minute
    calls: list[str] = []

    def count(name: str, inner: Any) -> None:
        def counted(self: Any, at: str) -> Any:
            calls.append(at)
            return inner(self, at)

        monkeypatch.setattr(mailbox.FolderMailbox, name, counted)

    def accept() -> None:
        with pytest.raises(OSError, match="closed"):
            listener.accept()

    count("get", mailbox.FolderMailbox.get)
    count("names", mailbox.FolderMailbox.names)
    listener, ours, theirs = pair(str(tmp_path))
    accepting = threading.Thread(target=accept)
    accepting.start()
    time.sleep(1.0)
    before = len(calls)
    time.sleep(2.0)
    assert 0 < len(calls) - before < 60  # of three that wait, a few times a second each
    ours.sendall(b"y")
    assert theirs.recv(1) == b"y"
    for one in (ours, theirs, listener):
        one.close()
    accepting.join()


def test_no_more_of_an_object_is_read_than_one_of_ours_may_have() -> None:
    pytest.importorskip("fsspec")
    box = FsspecMailbox("memory://large")
    box.put("a", bytes(8 * LARGEST_OBJECT_BYTES))
    tracemalloc.start()
    try:
        with pytest.raises(EngineError, match=f"expected at most {LARGEST_OBJECT_BYTES} bytes"):
            box.get("a")
        assert tracemalloc.get_traced_memory()[1] < 3 * LARGEST_OBJECT_BYTES
    finally:
        tracemalloc.stop()
        box.delete("a")


def test_a_store_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    pytest.importorskip("fsspec")
    pytest.importorskip("requests")
    monkeypatch.setattr(mailbox, "_ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = f"webhdfs://127.0.0.1:{silent.getsockname()[1]}/shared"
        with pytest.raises(EngineError, match=r"webhdfs://.*/shared: the store has not answered within 0.5 s"):
            connect_through_store(place)
        listener = Listener(place, 0, group=GROUP, access=TOKEN, accept=lambda _: None, link=None)
        until(lambda: "cannot connect to this one now: webhdfs://" in caplog.text)
        listener.close()
        deadline = time.monotonic() + 0.1
        with pytest.raises(EngineError, match=r"could not be reached at .* in time: .* has not answered"):
            connect(place, group=GROUP, access=TOKEN, rank=1, purpose="steps", deadline=deadline)


def test_calls_of_a_store_share_a_thread(tmp_path: Path) -> None:
    box = BoundedMailbox(str(tmp_path))
    box.put("a", b"x")
    before = set(threading.enumerate())
    for _ in range(100):
        assert box.get("a") == b"x"
    assert len(set(threading.enumerate()) - before) == 0
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "call-within"])


def test_a_store_that_hangs_takes_no_more_than_some_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, answers = threading.Event(), threading.Event()
    get = mailbox.FolderMailbox.get

    def slow(self: mailbox.FolderMailbox, name: str) -> bytes | None:
        hangs.set()
        answers.wait(60)
        return get(self, name)

    box = BoundedMailbox(str(tmp_path))
    box.put("a", b"x")
    before = threading.active_count()
    monkeypatch.setattr(mailbox.FolderMailbox, "get", slow)
    monkeypatch.setattr(mailbox, "_ANSWER_S", 0.01)
    try:
        for _ in range(100):
            with pytest.raises(EngineError, match="has not answered"):
                box.get("a")
        assert hangs.is_set()
        assert threading.active_count() <= before + 32
    finally:
        answers.set()
    monkeypatch.setattr(mailbox, "_ANSWER_S", 10.0)
    assert box.get("a") == b"x"


def test_a_listener_forgets_connections_that_have_ended(tmp_path: Path) -> None:
    listener = StoreListener(str(tmp_path))
    for _ in range(5):
        ours = connect_through_store(str(tmp_path))
        theirs, _ = listener.accept()
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x"
        theirs.sendall(b"y")
        assert ours.recv(1) == b"y"
        ours.close()
        theirs.close()
        until(lambda: not left(str(tmp_path)))
    inner: Any = listener._mailbox
    assert len(listener._known) <= 1
    assert len(inner._inner._made) <= 1
    listener.close()


def broken_by(
    place: str, hang: Callable[[], object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Check that a connection ends, and says why, when its store hangs."""
    listener, ours, theirs = pair(place)
    monkeypatch.setattr(mailbox, "_ANSWER_S", 1.0)
    with caplog.at_level(logging.WARNING):
        hang()
        for one in (ours, theirs):
            one.settimeout(60)
            assert one.recv(1) == b""
            one.close()
        listener.close()
    reason = f"a connection through the store broke: {place}: the store has not answered within 1 s"
    assert caplog.text.count(reason) == 2  # each side says it once


@pytest.mark.root
@NEEDS_FUSE
def test_a_connection_ends_when_its_folder_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    mounted: list[HangingFiles] = []

    def hang() -> None:
        mounted.append(HangingFiles(shared))
        mounted[0].hang()

    try:
        broken_by(str(shared), hang, monkeypatch, caplog)
    finally:
        for one in mounted:
            one.__exit__(None, None, None)


def test_a_connection_ends_when_its_object_store_hangs(
    s3: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken_by(s3.place, lambda: s3.process.send_signal(signal.SIGSTOP), monkeypatch, caplog)
