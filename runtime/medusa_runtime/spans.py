"""Spans of traces, by OpenTelemetry: what names them, and the thread that sends them.

Requests only note what a span needs. The thread makes the spans and sends them. It imports OpenTelemetry's packages
(half a second) once the process is ready, so that no start waits for them.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from .errors import MissingPackageError

logger = logging.getLogger(__name__)

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_POLL_S = 0.25
_SEND_S = 1.0
_MAX_PENDING = 10_000  # spans that wait; more are dropped
_LAST_SEND_S = 3.0


@dataclass
class Span:
    """A span to be sent. Ids are hexadecimal, as in a traceparent; times are nanoseconds since the epoch."""

    name: str
    trace: str
    id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    failed: bool = False
    inner: bool = False  # a part of what this process does, not a request that it serves


class SpanContext(NamedTuple):
    """A span's place in its trace. ``parent`` is empty for the first span of a trace."""

    trace: str
    id: str
    parent: str
    sampled: bool

    @property
    def traceparent(self) -> str:
        """The header by which the next process makes its span a child of this one (W3C Trace Context)."""
        return f"00-{self.trace}-{self.id}-{int(self.sampled):02x}"

    def child(self) -> SpanContext:
        return SpanContext(self.trace, new_id(), self.id, self.sampled)


def new_id() -> str:
    return os.urandom(8).hex()


def context_below(traceparent: str) -> SpanContext:
    """Return the context of a new span below the one that the header names, or of a new trace if it is invalid.

    A later version of the header may have more behind the flags; version 00 may not (Trace Context, 3.2).
    """
    given = _PARENT.fullmatch(traceparent.strip())
    bad = given is None or given[1] == "ff" or (given[1] == "00" and given[5])
    if given is None or bad or not int(given[2], 16) or not int(given[3], 16):
        return SpanContext(os.urandom(16).hex(), new_id(), "", True)
    return SpanContext(given[2], new_id(), given[3], bool(int(given[4], 16) & 1))


def check_installed() -> None:
    """Raise MissingPackageError if OpenTelemetry is not installed."""
    from importlib.util import find_spec

    try:
        found = find_spec("opentelemetry.exporter.otlp.proto.http")
    except ModuleNotFoundError:
        found = None
    if found is None:
        raise MissingPackageError("--traces otlp needs optional packages: pip install 'medusa-runtime[otel]'")


class SpanSender:
    """Sends spans in a thread of its own, every second."""

    def __init__(
        self, service: Callable[[], str], is_ready: Callable[[], bool], first: Callable[[], list[Span]] = list
    ) -> None:
        """``service`` gives the name of what is traced, once it ``is_ready``, and ``first`` the spans of its start."""
        self._service, self._is_ready, self._first = service, is_ready, first
        self.pending: deque[Span] = deque(maxlen=_MAX_PENDING)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Send the spans that are left; wait for that at most three seconds."""
        self._stopping.set()
        self._thread.join(_LAST_SEND_S)

    def _run(self) -> None:
        while not self._is_ready() and not self._stopping.wait(_POLL_S):
            pass
        try:
            export = _exporter(self._service())
        except Exception:
            logger.exception("traces cannot be sent")
            return
        self.pending.extendleft(reversed(self._first()))
        while True:
            last = self._stopping.wait(_SEND_S)
            batch = [self.pending.popleft() for _ in range(len(self.pending))]
            if batch:
                export(batch)
            if last:
                return


def _exporter(name: str) -> Callable[[list[Span]], None]:
    """Return a function that sends spans to OTEL_EXPORTER_OTLP_ENDPOINT. Imports OpenTelemetry."""
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace.status import Status, StatusCode

    exporter = OTLPSpanExporter()
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": name}
    resource = Resource.create(named)

    def context(of: str, span: str) -> Any:
        return trace.SpanContext(int(of, 16), int(span, 16), is_remote=False, trace_flags=trace.TraceFlags(1))

    def export(pending: list[Span]) -> None:
        spans = [
            ReadableSpan(
                name=each.name,
                context=context(each.trace, each.id),
                parent=context(each.trace, each.parent) if each.parent else None,
                resource=resource,
                attributes=each.attributes,
                kind=trace.SpanKind.INTERNAL if each.inner else trace.SpanKind.SERVER,
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
