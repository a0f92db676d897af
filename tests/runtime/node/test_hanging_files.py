"""A caller's folder on a file system of the caller's own, which hangs, or is slow, when the agent asks it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from hanging_files import FLUSH, LOOKUP, HangingFiles
from medusa_runtime.node.callers.file_status import file_status
from medusa_runtime.node.messages import receive, send
from strangers import MALLORY, as_user, ask

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.getuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"),
]

Start = Callable[..., Any]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder that everybody can reach."""
    for above in (tmp_path, *tmp_path.parents):
        if above == tmp_path or above.name.startswith(("pytest-", "popen-")):
            above.chmod(0o755)
    return tmp_path


@pytest.fixture
def model(safetensors_file: Callable[..., bytes]) -> dict[str, bytes]:
    weights = safetensors_file({"w": ("U8", [64], b"\1" * 64)})
    return {"config.json": b'{"model_type": "m"}', "model.safetensors": weights}


def connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    send(connection, "hello", {"version": 1})
    receive(connection)
    return connection


def test_a_status_is_that_of_fstat(tmp_path: Path) -> None:
    with open(tmp_path / "x", "w") as file, socket.socket() as connection:
        for descriptor in (file.fileno(), connection.fileno(), 0):
            found = os.fstat(descriptor)
            assert file_status(descriptor) == (found.st_mode, found.st_dev, found.st_ino)


def test_a_folder_that_hangs_stops_no_agent(start_node: Start, tmp_path: Path) -> None:
    node = start_node()
    with HangingFiles(tmp_path) as files:
        folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        files.hang()
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as connection:
            connection.connect(node.socket)
            send(connection, "hello", {"version": 1})
            send(connection, "region", {"url": str(tmp_path)}, [folder])
            with closing(node.client()) as other:
                for _ in range(10):  # longer than an agent's watchdog waits
                    assert other.status()["pid"] == node.process.pid
                    threading.Event().wait(0.5)
        threading.Thread(target=os.close, args=(folder,), daemon=True).start()
    assert node.stop() == 0


def test_a_file_that_hangs_at_its_end_stops_no_agent(start_node: Start, tmp_path: Path) -> None:
    """It once left an agent that nobody could kill (state D)."""
    node = start_node()
    with HangingFiles(tmp_path) as files:
        file = os.open(tmp_path / "file", os.O_RDONLY)
        files.hang()
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as connection:
            connection.connect(node.socket)
            send(connection, "hello", {"version": 1}, [file])
            send(connection, "region", {"url": str(tmp_path)}, [file])
            with closing(node.client()) as other:
                for _ in range(10):
                    assert other.status()["pid"] == node.process.pid
                    threading.Event().wait(0.5)
    with contextlib.suppress(OSError):
        os.close(file)
    assert node.stop() == 0


def test_a_model_whose_files_hang_at_their_end_stops_no_agent(
    start_node: Start, place: Path, model: dict[str, bytes]
) -> None:
    """The agent once held the files, and was asked for their end, as was every process that it forked."""
    node = start_node()
    with HangingFiles(place, model) as files:
        assert as_user(MALLORY, lambda: ask(node.socket, str(place))) == '{"model_type": "m"}'
        node.until(lambda: node.status()["regions"][0]["state"] == "done")
        files.hang(FLUSH)
        files.files["model.safetensors"] += b" "  # so that the region is dropped

        def again() -> None:
            folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
            with closing(connected(node.socket)) as connection:
                send(connection, "region", {"url": str(place)}, [folder])
                receive(connection)

        as_user(MALLORY, again)
        node.until(lambda: "is fetched again" in node.output())
        with closing(node.client()) as other:
            for _ in range(10):
                assert other.status()["pid"] == node.process.pid
                threading.Event().wait(0.5)
    assert node.stop() == 0


def test_prefetchers_that_cannot_be_killed_are_limited(start_node: Start, place: Path) -> None:
    node = start_node("--per-caller", "fetches=2")

    def fetch(folder: Path) -> str:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with closing(connected(node.socket)) as connection:
            send(connection, "region", {"url": str(folder)}, [opened])
            answer = receive(connection)
        return str(answer.body if answer else answer)

    with ExitStack() as mounts:
        for number in range(4):
            (folder := place / str(number)).mkdir()
            files = mounts.enter_context(HangingFiles(folder))
            files.hang(LOOKUP)
            assert "wait" in as_user(MALLORY, lambda folder=folder: fetch(folder))  # type: ignore[misc]
            node.until(lambda files=files: files.asked)  # type: ignore[misc]
        assert "expected at most 4 (--per-caller fetches=…)" in as_user(MALLORY, lambda: fetch(place))
        with closing(node.client()) as client:
            assert client.status()["callers"]["user 1001"] == {"fetches": 2, "prefetchers": 4}
        node.process.send_signal(signal.SIGTERM)
        assert node.process.wait(60) == 0, "it waits for those that cannot be killed"
        assert "killed, but not ended: " in node.output()


def test_a_slow_folder_stops_no_agent(start_node: Start, place: Path, model: dict[str, bytes]) -> None:
    """The agent once waited for the folder at each of a hundred requests, and its watchdog ended it."""
    node = start_node()

    def flood() -> None:
        folder = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
        connections = [connected(node.socket) for _ in range(100)]
        for connection in connections:
            send(connection, "region", {"url": str(place)}, [folder])
        for connection in connections:
            receive(connection)

    with HangingFiles(place, model) as files:
        assert as_user(MALLORY, lambda: ask(node.socket, str(place))) == '{"model_type": "m"}'
        files.slow_s = 0.2
        assert as_user(MALLORY, flood) == "None"
        assert node.status()["pid"] == node.process.pid, node.output()
