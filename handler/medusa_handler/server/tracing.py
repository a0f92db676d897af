"""Traces by OpenTelemetry: a span for each request, and the cold start with its stages (medusa_runtime/spans.py)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from medusa_runtime.spans import Span, SpanContext, SpanSender, context_below, new_id

from .access_log import AccessRecord, record_access

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from ..service import Service

_LONGEST_PATH = 256  # characters of a caller's path in a span: 10,000 whole paths could take 150 MB


class Tracer:
    """Notes requests and the start as spans."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.sender = SpanSender(self._name, lambda: service.ready, self._cold_start)

    def _name(self) -> str:
        return self._service.model.name if self._service.settings.model else "function"

    def around(self, app: WSGIApplication) -> WSGIApplication:
        """Wrap ``app``: note each request as a child of the span in its ``traceparent``, and put its own span there."""

        def call(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            context = context_below(environ.get("HTTP_TRACEPARENT", ""))
            if not context.parent:
                environ.pop("HTTP_TRACESTATE", None)  # it goes with the parent (Trace Context, section 3.2)
            environ["HTTP_TRACEPARENT"] = context.traceparent
            if not context.sampled:
                return app(environ, start_response)

            def ended(record: AccessRecord) -> None:
                self.sender.pending.append(_request_span(record, context))

            return record_access(app, AccessRecord(environ, ended), environ, start_response)

        return call

    def _cold_start(self) -> list[Span]:
        """Return the stages of the start as spans of one trace, below a span for the whole start."""
        stages = [stage for stage in self._service.timeline.stages() if stage.end_ns >= stage.start_ns]
        if not stages:
            return []
        offset_ns = time.time_ns() - time.monotonic_ns()
        trace, root = os.urandom(16).hex(), new_id()
        start_ns, end_ns = min(stage.start_ns for stage in stages), max(stage.end_ns for stage in stages)
        spans = [Span("cold start", trace, root, "", start_ns, end_ns, {}, inner=True)]
        for stage in stages:
            detail = {f"medusa.{name}": value for name, value in stage.detail.items() if _is_plain(value)}
            detail["medusa.process"] = stage.process
            spans.append(Span(stage.name, trace, new_id(), root, stage.start_ns, stage.end_ns, detail, inner=True))
        for span in spans:
            span.start_ns += offset_ns
            span.end_ns += offset_ns
        return spans


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | bool | int | float)


def _request_span(record: AccessRecord, context: SpanContext) -> Span:
    path = record.path[:_LONGEST_PATH].encode("utf-8", "replace").decode()
    attributes = {
        "http.request.method": record.method,
        "url.path": path,
        "http.response.status_code": record.status,
        "http.response.body.size": record.sent_bytes,
        "medusa.request_id": record.request_id[:_LONGEST_PATH],
    }
    times = record.began_ns, record.began_ns + int(record.seconds * 1e9)
    at = context.trace, context.id, context.parent, *times
    return Span(f"{record.method} {path}", *at, attributes, failed=record.status >= 500)
