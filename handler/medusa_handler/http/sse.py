"""Server-sent events (WHATWG HTML, section 9.2), as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..faults import compact

if TYPE_CHECKING:
    from ..service import Service

MIME_TYPE = "text/event-stream"
CONTENT_TYPE = f"{MIME_TYPE}; charset=utf-8"
# Each stream has them, also one of the engine's own server, or else a proxy such as nginx would keep tokens back.
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
HEARTBEAT = b": waiting\n\n"
DONE = b"data: [DONE]\n\n"


def heartbeat(service: Service) -> bytes:
    """Return a comment for a silent stream. While the model is fetched, it reports the progress."""
    if service.ready or service.region is None:
        return HEARTBEAT
    progress = service.region.progress()
    return _waiting(progress.fetched_bytes, progress.total_bytes, service.model.eta_s())


def _waiting(fetched_bytes: int, total_bytes: int, eta_s: float) -> bytes:
    done = f"{fetched_bytes / 1e6:.0f} of {total_bytes / 1e6:.0f} MB fetched, " if total_bytes else ""
    return f": waiting for the model, {done}about {eta_s:.0f} s left\n\n".encode()


def named_event(data: Mapping[str, Any]) -> bytes:
    """Return an event of an interface whose events have a type, which also stands in a line of its own."""
    return f"event: {data['type']}\n".encode() + event(data)


def event(data: Any) -> bytes:
    """Return one event. Text is sent as it is, each line in a ``data:`` line of its own; anything else as JSON."""
    if isinstance(data, bytes | bytearray):
        data = bytes(data).decode("utf-8", "replace")
    if isinstance(data, str):
        lines = data.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        return "".join(f"data: {line}\n" for line in lines).encode("utf-8", "replace") + b"\n"
    return b"data: " + compact(data) + b"\n\n"
