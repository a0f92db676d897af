"""Traces by OpenTelemetry: a span for each request, with one for each time that it waits for an instance or runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from medusa_runtime.spans import Span, SpanContext, SpanSender, context_below

_SERVICE = "medusa-gateway"


class RequestTrace:
    """The spans of one request. Without a ``sender`` nothing is noted, and headers are passed on as they came."""

    def __init__(self, sender: SpanSender | None, traceparent: str = "") -> None:
        self._context = context_below(traceparent)
        self._sender = sender if self._context.sampled else None
        self._began_ns = _now_ns()

    @contextmanager
    def stage(self, name: str, **attributes: str) -> Iterator[Mapping[str, str]]:
        """Note what the block does as a span, also if it fails. Gives the headers for a process that it calls."""
        if self._sender is None:
            yield {}
            return
        context, began_ns, failed = self._context.child(), _now_ns(), True
        try:
            yield {"Traceparent": context.traceparent}
            failed = False
        finally:
            self._note(name, context, began_ns, attributes, failed=failed, inner=True)

    def end(self, method: str, path: str, model: str, status: int, request_id: str) -> None:
        """Note the whole request."""
        attributes: dict[str, str | int] = {
            "http.request.method": method,
            "url.path": path,
            "http.response.status_code": status,
            "medusa.model": model,
            "medusa.request_id": request_id,
        }
        self._note(f"{method} {path}", self._context, self._began_ns, attributes, failed=status >= 500)

    def _note(
        self,
        name: str,
        context: SpanContext,
        began_ns: tuple[int, int],
        attributes: Mapping[str, str | int],
        *,
        failed: bool,
        inner: bool = False,
    ) -> None:
        if self._sender is not None:
            wall_ns, monotonic_ns = began_ns
            times = wall_ns, wall_ns + time.monotonic_ns() - monotonic_ns  # the wall clock may be set meanwhile
            at = context.trace, context.id, context.parent, *times
            self._sender.pending.append(Span(name, *at, dict(attributes), failed=failed, inner=inner))

    @property
    def is_new(self) -> bool:
        """True if the trace begins here. Then a ``tracestate`` that came with the request belongs to no trace."""
        return self._sender is not None and not self._context.parent


def _now_ns() -> tuple[int, int]:
    return time.time_ns(), time.monotonic_ns()


NOT_TRACED = RequestTrace(None)


class Tracer:
    """Notes the requests of a gateway, and sends their spans."""

    def __init__(self) -> None:
        self._sender = SpanSender(lambda: _SERVICE, lambda: True)

    def begin(self, headers: Mapping[str, str]) -> RequestTrace:
        return RequestTrace(self._sender, headers.get("Traceparent", ""))

    def close(self) -> None:
        """Send the spans that are left; wait for that at most three seconds."""
        self._sender.close()
