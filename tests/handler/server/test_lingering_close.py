"""Connections whose answer is sent are closed when the client has left, and hold no thread until then."""

from __future__ import annotations

import socket
import time

from medusa_handler.server.lingering_close import LingeringClose


def closed(connection: socket.socket) -> bool:
    for _ in range(3000):
        if connection.fileno() == -1:
            return True
        time.sleep(0.02)
    return False


def test_a_client_that_goes_on_sending_reads_its_answer_to_the_end() -> None:
    lingering = LingeringClose()
    ours, client = socket.socketpair()
    with client:
        ours.sendall(b"answer")
        lingering.add(ours)  # returns at once, although the client is there
        client.sendall(b"more" * 1000)
        assert client.recv(100) == b"answer"
        assert client.recv(100) == b""
    assert closed(ours)


def test_one_that_never_leaves_and_one_that_has_left() -> None:
    lingering = LingeringClose()
    ours, client = socket.socketpair()
    left, other = socket.socketpair()
    other.close()
    with client:
        lingering.add(ours)
        lingering.add(left)
        assert closed(left)
        assert closed(ours)
