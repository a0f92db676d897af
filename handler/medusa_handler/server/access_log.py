"""A line for each request that a worker has answered, on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment


class AccessRecord:
    """One request as logs and traces show it: its status, size and duration.

    ``ended`` is called once, after the last byte has been given to the server.
    """

    def __init__(self, environ: WSGIEnvironment, ended: Callable[[AccessRecord], None]) -> None:
        self.method = str(environ["REQUEST_METHOD"])
        self.path = str(environ["PATH_INFO"])
        self.client = str(environ.get("REMOTE_ADDR", ""))
        self.status = 0
        self.sent_bytes = 0
        self.request_id = ""
        self.began_ns = time.time_ns()
        self._began = time.monotonic()
        self.seconds = 0.0
        self._ended: Callable[[AccessRecord], None] | None = ended

    def start(self, start_response: StartResponse) -> Callable[..., Any]:
        """Return a ``start_response`` that also notes the status and the request's id."""

        def start(status: str, headers: list[tuple[str, str]], *rest: Any) -> Any:
            self.status = int(status.split(" ", 1)[0])
            self.request_id = next((value for name, value in headers if name.lower() == "x-request-id"), "")
            return start_response(status, headers, *rest)

        return start

    def end(self) -> None:
        ended, self._ended = self._ended, None
        if ended is not None:
            self.seconds = time.monotonic() - self._began
            ended(self)


class _CountedBody:
    """A response's body that counts its bytes, and ends ``record`` when it is closed."""

    def __init__(self, body: Iterable[bytes], record: AccessRecord) -> None:
        self._body = body
        self._record = record

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._body:
            self._record.sent_bytes += len(piece)
            yield piece

    def close(self) -> None:
        try:
            getattr(self._body, "close", lambda: None)()
        finally:
            self._record.end()


def record_access(
    app: WSGIApplication, record: AccessRecord, environ: WSGIEnvironment, start_response: StartResponse
) -> Iterable[bytes]:
    """Call ``app``, and record in ``record`` how it ended."""
    try:
        body = app(environ, record.start(start_response))
    except BaseException:
        record.status = record.status or 500
        record.end()
        raise
    return _CountedBody(body, record)


def with_access_log(app: WSGIApplication, form: str) -> WSGIApplication:
    """Wrap ``app`` so that each answered request is logged, in the ``form`` text or json.

    The query is left out, because it may hold secrets.
    """
    format_line = _as_json if form == "json" else _as_text

    def write_line(record: AccessRecord) -> None:
        sys.stderr.write(format_line(record) + "\n")
        sys.stderr.flush()

    return lambda environ, start_response: record_access(
        app, AccessRecord(environ, write_line), environ, start_response
    )


def _as_text(record: AccessRecord) -> str:
    path = record.path.encode("unicode_escape").decode().replace(" ", "%20")
    return (
        f"{_moment(record)} {record.client or '-'} {record.method} {path} {record.status} {record.sent_bytes} B "
        f"{record.seconds * 1e3:.1f} ms {record.request_id or '-'}"
    )


def _as_json(record: AccessRecord) -> str:
    return json.dumps(
        {
            "time": _moment(record),
            "client": record.client,
            "method": record.method,
            "path": record.path,
            "status": record.status,
            "bytes": record.sent_bytes,
            "seconds": round(record.seconds, 6),
            "request_id": record.request_id,
        }
    )


def _moment(record: AccessRecord) -> str:
    seconds, ns = divmod(record.began_ns, 10**9)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{ns // 10**6:03d}Z"
