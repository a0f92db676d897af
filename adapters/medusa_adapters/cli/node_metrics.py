"""`medusa node --metrics-port`: the agent's status in Prometheus' text format, served by a process of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from medusa_runtime.errors import ConfigError
from medusa_runtime.node.client import NodeClient
from medusa_runtime.prometheus import Labels, gauge

from ..platforms.metrics_server import serve_forever

_NO_REFUSALS = {"Node.Refused": 0, "Weights.TooLarge": 0, "Node.Failed": 0}  # so that the first one is an increase
_FRESH_S = 1.0


def open_listener(port: int) -> socket.socket:
    """Listen on all addresses. Raises ConfigError if the port is not available."""
    try:
        return socket.create_server(("", port), backlog=16)
    except OSError as error:
        raise ConfigError(f"--metrics-port={port} cannot be used: {error.strerror}; expected a free port") from None


def serve(listener: socket.socket, path: str) -> int:
    """Answer ``GET /metrics`` with the status of the agent at ``path``, for ever."""
    serve_forever(_Page(path), listener)
    return 0


class _Page:
    """The page, which is made once a second at most: everyone who reaches the port may ask."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._text, self._made_at = "", -_FRESH_S

    def __call__(self) -> str:
        """Return the page. Raises NodeError if the agent does not answer."""
        with self._lock:
            if time.monotonic() - self._made_at >= _FRESH_S:
                client = NodeClient(self._path)
                try:
                    self._text, self._made_at = exposition(client.status()), time.monotonic()
                finally:
                    client.close()
            return self._text


def exposition(status: Mapping[str, Any]) -> str:
    """Return the status of an agent as Prometheus' text."""
    return "\n".join(_lines(status)) + "\n"


def _lines(status: Mapping[str, Any]) -> Iterator[str]:
    regions, engines = status["regions"], status["engines"]
    info = (("runtime", status["runtime"]),)
    yield from gauge("medusa_node_info", "The version of the agent's software.", (info, 1))
    yield from gauge("medusa_node_uptime_seconds", "Since the agent started.", ((), status["uptime_s"]))
    yield from gauge("medusa_node_budget_bytes", "Memory that models may take.", ((), status["budget_bytes"]))
    yield from gauge("medusa_node_used_bytes", "Memory that models take.", ((), status["used_bytes"]))
    yield from gauge(
        "medusa_node_left_bytes",
        "Memory of replaced and dropped models that functions still use; part of what is used.",
        ((), status["left_bytes"]),
    )
    for name, text in (
        ("memory_bytes", "Memory of a model."),
        ("fetched_bytes", "Bytes of a model's weights that are there."),
        ("in_use_by", "Functions that use a model."),
        ("retries_total", "Requests for a model to its store that were tried again."),
    ):
        sums: Counter[str] = Counter()  # users with other rights have regions of their own
        for region in regions:
            sums[region["url"]] += region[name]
        yield from gauge(f"medusa_node_model_{name}", text, *_by("model", sums.items()))
    yield from gauge(
        "medusa_node_fetches_total", "Fetches that ended, by how.", *_by("result", status["fetches"].items())
    )
    yield from gauge(
        "medusa_node_refused_total",
        "Requests that were refused, by the error's code.",
        *_by("code", {**_NO_REFUSALS, **status["refused"]}.items()),
    )
    yield from gauge(
        "medusa_node_hung_total", "Processes that hung and were replaced.", *_by("process", status["replaced"].items())
    )
    for name, text in (
        ("wanted", "Idle engine processes to keep."),
        ("warm", "Idle engine processes that are warm."),
        ("serving", "Engine processes that functions have."),
    ):
        yield from gauge(
            f"medusa_node_engines_{name}", text, *_by("kind", ((kind, of[name]) for kind, of in engines.items()))
        )
    given_up = ((kind, int(of["failure"] is not None)) for kind, of in engines.items())
    yield from gauge(
        "medusa_node_engines_given_up",
        "1 if no more engine processes are started, because they end.",
        *_by("kind", given_up),
    )


def _by(label: str, values: Iterable[tuple[str, float]]) -> Iterator[tuple[Labels, float]]:
    return ((((label, str(name)),), value) for name, value in values)
