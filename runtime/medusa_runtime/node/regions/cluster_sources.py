"""Ask this node's server in the cluster which peers have a model."""

from __future__ import annotations

import json
import logging
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ...storage.base import Store, redacted
from ...storage.peer import PeerStore
from ...storage.peer_access import PeerAccess
from ...storage.sources import SourcesStore

logger = logging.getLogger(__name__)

_WITHIN_S = 0.5  # the time limit for an answer; short, because a fetch waits for it
_LONGEST_BYTES = 1 << 20
_MOST_SOURCES = 64


@dataclass(frozen=True, slots=True)
class ClusterAccess:
    """The control socket of this node's server, and the credentials for peers."""

    socket: str
    access: PeerAccess


def open_sources(cluster: ClusterAccess, model_url: str, origin: Store, on_change: Callable[[], None]) -> SourcesStore:
    """Return a store that reads from the peers that have the model, and from ``origin``, the model's own store."""
    context = cluster.access.client_context()
    return SourcesStore(
        origin,
        lambda node_url: PeerStore(node_url, model_url, cluster.access, context),
        find_peers=partial(ask_sources, cluster.socket, model_url),
        on_change=on_change,
    )


def ask_sources(control_socket: str, model_url: str, include_unplanned: bool) -> list[str]:
    """Return the URLs of the node servers that have a model, best first; none if the control socket does not answer.

    With ``include_unplanned``, also return those that the plan does not name.
    """
    request = {"op": "sources", "url": model_url, "again": include_unplanned}
    try:
        return _urls(_exchange(control_socket, json.dumps(request).encode() + b"\n"))
    except (OSError, ValueError) as error:
        logger.warning(
            "fetching %s from its store alone: %s does not say which nodes have it (%s)",
            redacted(model_url),
            control_socket,
            str(error)[:100] or type(error).__name__,
        )
        return []


def _exchange(control_socket: str, request: bytes) -> bytes:
    deadline, answer = time.monotonic() + _WITHIN_S, bytearray()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as connection:
        connection.settimeout(_WITHIN_S)
        connection.connect(control_socket)
        connection.sendall(request)
        while not answer.endswith(b"\n") and len(answer) < _LONGEST_BYTES:
            connection.settimeout(max(deadline - time.monotonic(), 1e-3))
            if not (data := connection.recv(64 << 10)):
                break
            answer += data
    return bytes(answer)


def _urls(answer: bytes) -> list[str]:
    try:
        found = json.loads(answer)
    except RecursionError:
        found = None
    urls = found.get("ok") if isinstance(found, dict) else None
    if not isinstance(urls, list) or not all(isinstance(each, str) for each in urls):
        raise ValueError(f"expected a list of URLs, found {answer[:60]!r}")
    return urls[:_MOST_SOURCES]


__all__ = ["ClusterAccess", "ask_sources", "open_sources"]
