"""A client that is there before the server: it connects as soon as the port accepts, and times the first token."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from medusa_runtime.errors import EngineError, UnreachableError

Connection = http.client.HTTPConnection

_RETRY_S = 0.002


class Completion(NamedTuple):
    """A streamed completion: times are CLOCK_MONOTONIC nanoseconds, at the client."""

    first_token_ns: int
    end_ns: int
    text: str
    tokens: int


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def connect(port: int, alive: Callable[[], bool], timeout_s: float) -> Connection:
    """A connection to a server that is still starting. UnreachableError when it ends or takes too long."""
    deadline = time.monotonic() + timeout_s
    while alive() and time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        try:
            connection.connect()
            return connection
        except ConnectionRefusedError:
            time.sleep(_RETRY_S)
    raise UnreachableError(f"nothing answered on port {port} within {timeout_s:.0f} s")


def stream(connection: Connection, body: dict[str, Any]) -> Completion:
    """Send a completion request and read its stream to the end. Raises EngineError for a refusal or a broken stream."""
    connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), _JSON)
    response = connection.getresponse()
    if response.status != 200:
        raise EngineError(f"expected a stream, found status {response.status}: {response.read(2000).decode()}")
    first_ns, pieces, tokens = 0, [], 0
    for line in response:
        if not line.startswith(b"data: "):
            continue
        if line.startswith(b"data: [DONE]"):
            break
        event = json.loads(line[6:])
        if "error" in event:
            raise EngineError(f"the stream ended with {event['error']}")
        if event.get("choices"):
            first_ns = first_ns or time.monotonic_ns()
            pieces.append(event["choices"][0].get("text") or "")
        if event.get("usage"):
            tokens = event["usage"]["completion_tokens"]
    if not first_ns:
        raise EngineError("the stream ended without a token")
    response.read()
    return Completion(first_ns, time.monotonic_ns(), "".join(pieces), tokens)


def get(connection: Connection, path: str) -> tuple[int, Any]:
    """Status and JSON body (None when it is not JSON) of a GET."""
    connection.request("GET", path)
    response = connection.getresponse()
    data = response.read()
    try:
        return response.status, json.loads(data)
    except ValueError:
        return response.status, None


_JSON = {"Content-Type": "application/json"}
