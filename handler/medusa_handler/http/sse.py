"""Server-sent events (WHATWG HTML, section 9.2), as OpenAI's clients read them."""

from __future__ import annotations

from typing import Any

from ..faults import compact

CONTENT_TYPE = "text/event-stream; charset=utf-8"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
HEARTBEAT = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"


def waiting(fetched_bytes: int, total_bytes: int, eta_s: float) -> bytes:
    """A heartbeat of a stream that waits for the model."""
    done = f"{fetched_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB fetched, " if total_bytes else ""
    return f": waiting for the model, {done}about {eta_s:.0f} s left\n\n".encode()


def event(data: Any) -> bytes:
    """One event: text as it is, a line of it per ``data:`` line; anything else as JSON."""
    if isinstance(data, bytes | bytearray):
        data = bytes(data).decode("utf-8", "replace")
    if isinstance(data, str):
        lines = data.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        return "".join(f"data: {line}\n" for line in lines).encode() + b"\n"
    return b"data: " + compact(data).encode("utf-8", "replace") + b"\n\n"
