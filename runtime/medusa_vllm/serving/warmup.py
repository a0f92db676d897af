"""Requests that warm up vLLM's server: they do the work that only the first requests cause."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Callable

from medusa_runtime.engine.http_response import FieldError, HttpResponse

logger = logging.getLogger(__name__)

_LONGEST_S = 10.0
_MESSAGES = [{"role": "user", "content": "abc"}]
_REQUESTS = (
    ("/v1/responses", {"input": "abc", "max_output_tokens": 1}),
    ("/v1/completions", {"prompt": "abc", "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": _MESSAGES, "max_tokens": 1}),
    ("/v1/chat/completions", {"messages": _MESSAGES, "max_tokens": 2, "stream": True}),
    ("/v1/messages", {"messages": _MESSAGES, "max_tokens": 1}),
)


def send_warmup_requests(take: Callable[[socket.socket], None], model: str) -> list[int]:
    """Send a request of each kind to a server, and return the statuses, 0 for none. ``take`` takes a connection."""
    return [_ask(take, path, {"model": model, **body}) for path, body in _REQUESTS]


def _ask(take: Callable[[socket.socket], None], path: str, body: dict[str, object]) -> int:
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: engine\r\nConnection: close\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    ours, theirs = socket.socketpair()
    with ours:
        take(theirs)
        ours.settimeout(_LONGEST_S)
        answer = HttpResponse(ours, "POST")
        try:
            ours.sendall(head.encode() + data)
            answer.begin()
            for _ in answer.pieces():
                pass
        except (OSError, FieldError) as error:  # the first request of an instance then takes longer, but is answered
            logger.debug("the warm-up request to %s failed: %s", path, error)
            return 0
    return answer.status


__all__ = ["send_warmup_requests"]
