"""Traces by OpenTelemetry: a span for each request, and the cold start with its stages.

Requests only note what a span needs. A thread makes the spans and sends them. It imports OpenTelemetry's packages (half
a second) once the function is ready, so that no start waits for them.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from medusa_runtime.errors import MissingPackageError

from .access_log import AccessRecord, record_access

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from ..service import Service

logger = logging.getLogger(__name__)

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_POLL_S = 0.25
_SEND_S = 1.0
_MAX_PENDING = 10_000  # spans that wait; more are dropped
_LAST_SEND_S = 3.0
_LONGEST_PATH = 256  # characters of a caller's path in a span: 10,000 whole paths could take 150 MB


@dataclass
class _PendingSpan:
    """A span to be made. Ids are hexadecimal, as in a traceparent."""

    name: str
    trace: str
    span: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool = False
    inner: bool = False  # a stage of the start, not a request


def check_installed() -> None:
    """Raise MissingPackageError if OpenTelemetry is not installed."""
    from importlib.util import find_spec

    try:
        found = find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise MissingPackageError("--traces otlp needs optional packages: pip install 'medusa-runtime[otel]'")


class Tracer:
    """Notes requests and, in a thread of its own, sends their spans."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._pending: deque[_PendingSpan] = deque(maxlen=_MAX_PENDING)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def around(self, app: WSGIApplication) -> WSGIApplication:
        """Wrap ``app``: note each request as a child of the span in its ``traceparent``, and put its own span there."""

        def call(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            found = _parent_of(environ.get("HTTP_TRACEPARENT", ""))
            trace, parent, sampled = found or (os.urandom(16).hex(), "", True)
            span = os.urandom(8).hex()
            if found is None:
                environ.pop("HTTP_TRACESTATE", None)  # it goes with the parent (Trace Context, section 3.2)
            environ["HTTP_TRACEPARENT"] = f"00-{trace}-{span}-{int(sampled):02x}"
            if not sampled:
                return app(environ, start_response)

            def ended(record: AccessRecord) -> None:
                self._pending.append(_request_span(record, trace, span, parent))

            return record_access(app, AccessRecord(environ, ended), environ, start_response)

        return call

    def close(self) -> None:
        """Send the spans that are left; wait for that at most three seconds."""
        self._stopping.set()
        self._thread.join(_LAST_SEND_S)

    def _run(self) -> None:
        while not self._service.ready and not self._stopping.wait(_POLL_S):
            pass
        try:
            export = _exporter(self._service.model.name if self._service.settings.model else "function")
        except Exception:
            logger.exception("traces cannot be sent")
            return
        self._pending.extendleft(reversed(self._cold_start()))
        while True:
            last = self._stopping.wait(_SEND_S)
            batch = [self._pending.popleft() for _ in range(len(self._pending))]
            if batch:
                export(batch)
            if last:
                return

    def _cold_start(self) -> list[_PendingSpan]:
        """Return the stages of the start as spans of one trace, below a span for the whole start."""
        stages = [stage for stage in self._service.timeline.stages() if stage.end_ns >= stage.start_ns]
        if not stages:
            return []
        offset_ns = time.time_ns() - time.monotonic_ns()
        trace, root = os.urandom(16).hex(), os.urandom(8).hex()
        start_ns, end_ns = min(stage.start_ns for stage in stages), max(stage.end_ns for stage in stages)
        spans = [_PendingSpan("cold start", trace, root, "", start_ns, end_ns, {}, inner=True)]
        for stage in stages:
            detail = {f"medusa.{name}": value for name, value in stage.detail.items() if _is_plain(value)}
            detail["medusa.process"] = stage.process
            spans.append(
                _PendingSpan(
                    stage.name, trace, os.urandom(8).hex(), root, stage.start_ns, stage.end_ns, detail, inner=True
                )
            )
        for span in spans:
            span.start_ns += offset_ns
            span.end_ns += offset_ns
        return spans


def _parent_of(header: str) -> tuple[str, str, bool] | None:
    """Return a traceparent's trace and span, and whether it is sampled; None if it is invalid (Trace Context, 3.2).

    A later version may have more behind the flags; version 00 may not.
    """
    given = _PARENT.fullmatch(header.strip())
    if given is None or given[1] == "ff" or (given[1] == "00" and given[5]):
        return None
    if not int(given[2], 16) or not int(given[3], 16):
        return None
    return given[2], given[3], bool(int(given[4], 16) & 1)


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | bool | int | float)


def _request_span(record: AccessRecord, trace: str, span: str, parent: str) -> _PendingSpan:
    path = record.path[:_LONGEST_PATH].encode("utf-8", "replace").decode()
    attributes = {
        "http.request.method": record.method,
        "url.path": path,
        "http.response.status_code": record.status,
        "http.response.body.size": record.sent_bytes,
        "medusa.request_id": record.request_id[:_LONGEST_PATH],
    }
    end_ns = record.began_ns + int(record.seconds * 1e9)
    name = f"{record.method} {path}"
    return _PendingSpan(name, trace, span, parent, record.began_ns, end_ns, attributes, failed=record.status >= 500)


def _exporter(name: str) -> Callable[[list[_PendingSpan]], None]:
    """Return a function that sends spans to OTEL_EXPORTER_OTLP_ENDPOINT. Imports OpenTelemetry."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags
    from opentelemetry.trace.status import Status, StatusCode

    exporter = OTLPSpanExporter()
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": name}
    resource = Resource.create(named)

    def context(trace: str, span: str) -> Any:
        return SpanContext(int(trace, 16), int(span, 16), is_remote=False, trace_flags=TraceFlags(1))

    def export(pending: list[_PendingSpan]) -> None:
        spans = [
            ReadableSpan(
                name=each.name,
                context=context(each.trace, each.span),
                parent=context(each.trace, each.parent) if each.parent else None,
                resource=resource,
                attributes=each.attributes,
                kind=SpanKind.INTERNAL if each.inner else SpanKind.SERVER,
                status=Status(StatusCode.ERROR if each.failed else StatusCode.UNSET),
                start_time=each.start_ns,
                end_time=each.end_ns,
            )
            for each in pending
        ]
        try:
            exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - whatever it is, requests go on
            logger.warning("%d spans could not be sent: %s", len(spans), error)

    return export
