"""Connecting to an engine's own HTTP server over the engine's socket."""

from __future__ import annotations

import os
import resource
import socket
import threading
from pathlib import Path

from medusa_runtime.engine import frames
from medusa_runtime.engine.http_connection import connect_http


def test_a_function_with_a_thousand_clients_connects(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    listener = socket.create_server(str(tmp_path / "engine.sock"), family=socket.AF_UNIX)
    looked = threading.Event()

    def answer() -> None:
        connection, _ = listener.accept()
        assert frames.FrameReader(connection).read() == {"type": "http"}
        looked.wait(10)  # the server is not up yet
        connection.sendall(frames.pack({"type": "http"}))
        connection.close()

    engine = threading.Thread(target=answer)
    engine.start()
    clients = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]  # select(2) takes descriptors below 1024
    try:
        connection = connect_http(str(tmp_path / "engine.sock"), looked.set)
        assert connection.fileno() > 1023
        connection.close()
    finally:
        for client in clients:
            os.close(client)
        engine.join(10)
        listener.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
