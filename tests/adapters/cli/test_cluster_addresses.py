"""Commands that are told a wrong place, or numbers that do not fit together, say so in one line."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from medusa_adapters.cli.main import main

GATEWAY = b'{"error":{"message":"/cluster/status does not take POST","type":"x","param":null,"code":"bad_method"}}'


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """A server that sends the same bytes to everybody. Yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text("0123456789abcdef")
    return path


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            b"HTTP/1.1 405 Method Not Allowed\r\nContent-Length: %d\r\n\r\n%s" % (len(GATEWAY), GATEWAY),
            "is no node server, but perhaps a gateway: expected the port that a node was started with as --data-port",
        ),
        (b"\0\0\x18\4\0\0\0\0\0\0\4\0\x3f\xff" * 2, "cannot be reached: it does not speak HTTP"),  # such as Ray's
    ],
    ids=["gateway", "ray"],
)
def test_a_port_of_something_else_is_named(
    token: Path, answer: bytes, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(answer) as address:
        assert main(["cluster", "status", "--address", address, "--token-file", str(token)]) == 1
    error = capsys.readouterr().err
    assert address in error
    assert told in error
    assert error.count("\n") == 1


def test_fewer_instances_at_most_than_always_run_are_refused(token: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["cluster", "deploy", "m", "--model", "http://s/m", "--min", "3", "--max", "1"]
    assert main([*command, "--address", "127.0.0.1:9", "--token-file", str(token)]) == 2
    assert "expected min up to max, found min 3 and max 1" in capsys.readouterr().err
