"""Nodes with certificates: mutual TLS, and nobody without a certificate of the cluster."""

from __future__ import annotations

import contextlib
import shutil
import socket
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from certificates import make_certificates
from peer_nodes import Model, Node

pytestmark = pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl, to make certificates")


@pytest.fixture
def certificates(folder: Path) -> tuple[Path, Path, Path]:
    """A cluster's CA, and a node's certificate and key."""
    return make_certificates(folder)


def test_nodes_with_certificates_speak_mutual_tls(
    nodes: Callable[..., list[Node]], model: Model, certificates: tuple[Path, Path, Path]
) -> None:
    first, second = nodes(2, certificates)
    second.read_from(first)
    regions = [node.fetch(model.url) for node in (first, second)]
    for region in regions:
        model.check(region)
    assert second.held()["sources"]["received_bytes"] == {first.url: len(model.data), "store": 0}

    stranger = ssl.create_default_context(cafile=str(certificates[0]))
    stranger.check_hostname = False
    assert _answer(first, stranger) == b""


def _answer(node: Node, context: ssl.SSLContext) -> bytes:
    """The answer to one who has no certificate: none, or an alert in TLS 1.2."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        plain = stack.enter_context(socket.create_connection((node.host, node.port)))
        connection = stack.enter_context(context.wrap_socket(plain))
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        return connection.recv(100)
    return b""


def test_a_node_without_certificates_does_not_use_one_that_has_some(
    nodes: Callable[..., list[Node]], model: Model, certificates: tuple[Path, Path, Path]
) -> None:
    (first,) = nodes(1, certificates)
    (second,) = nodes(1)
    model.check(first.fetch(model.url))
    second.read_from(first)
    model.check(second.fetch(model.url))
    assert "expected http://" in second.output()
