"""A streamed completion over HTTP, with the time of its first token."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any, NamedTuple

from medusa_runtime.errors import EngineError


class Completion(NamedTuple):
    """A streamed completion: times are CLOCK_MONOTONIC nanoseconds, at the client."""

    first_token_ns: int
    end_ns: int
    text: str
    tokens: int


def stream(connection: http.client.HTTPConnection, body: dict[str, Any]) -> Completion:
    """Send a completion request and read its stream to the end. Raises EngineError for a refusal or a broken stream."""
    encoded = json.dumps(body | {"stream": True})
    connection.request("POST", "/v1/completions", encoded, {"Content-Type": "application/json"})
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
