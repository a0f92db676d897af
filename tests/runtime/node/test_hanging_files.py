"""A caller's folder on a file system of the caller's own, which answers until it is asked by the agent."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hanging_files import HangingFiles
from medusa_runtime.node.callers.file_status import file_status
from medusa_runtime.node.messages import send

pytestmark = [
    pytest.mark.root,
    pytest.mark.timeout(120),
    pytest.mark.skipif(os.getuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and /dev/fuse"),
]

Start = Callable[..., Any]


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
