"""A line for each request that a worker has answered, on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Wsgi = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Answer:
    """The answer to one request: its status, size and duration.

    ``ended`` is called once, after the last byte has been given to the server.
    """

    def __init__(self, environ: dict[str, Any], ended: Callable[[Answer], None]) -> None:
        self.method = str(environ["REQUEST_METHOD"])
        self.path = str(environ["PATH_INFO"])
        self.client = str(environ.get("REMOTE_ADDR", ""))
        self.status = 0
        self.sent_bytes = 0
        self.request_id = ""
        self.began_ns = time.time_ns()
        self._began = time.monotonic()
        self.seconds = 0.0
        self._ended: Callable[[Answer], None] | None = ended

    def start(self, start_response: Callable[..., Any]) -> Callable[..., Any]:
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


class _Counted:
    """A response's body that counts its bytes, and ends ``answer`` when it is closed."""

    def __init__(self, body: Iterable[bytes], answer: Answer) -> None:
        self._body = body
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        for piece in self._body:
            self._answer.sent_bytes += len(piece)
            yield piece

    def close(self) -> None:
        try:
            getattr(self._body, "close", lambda: None)()
        finally:
            self._answer.end()


def watched(app: Wsgi, answer: Answer, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Call ``app``, and record in ``answer`` how it ended."""
    try:
        body = app(environ, answer.start(start_response))
    except BaseException:
        answer.status = answer.status or 500
        answer.end()
        raise
    return _Counted(body, answer)


def with_access_log(app: Wsgi, form: str) -> Wsgi:
    """Wrap ``app`` so that each answered request is logged, in the ``form`` text or json.

    The query is left out, because it may hold secrets.
    """
    write = _as_json if form == "json" else _as_text

    def show(answer: Answer) -> None:
        sys.stderr.write(write(answer) + "\n")
        sys.stderr.flush()

    return lambda environ, start_response: watched(app, Answer(environ, show), environ, start_response)


def _as_text(answer: Answer) -> str:
    path = answer.path.encode("unicode_escape").decode().replace(" ", "%20")
    return (
        f"{_moment(answer)} {answer.client or '-'} {answer.method} {path} {answer.status} {answer.sent_bytes} B "
        f"{answer.seconds * 1e3:.1f} ms {answer.request_id or '-'}"
    )


def _as_json(answer: Answer) -> str:
    return json.dumps(
        {
            "time": _moment(answer),
            "client": answer.client,
            "method": answer.method,
            "path": answer.path,
            "status": answer.status,
            "bytes": answer.sent_bytes,
            "seconds": round(answer.seconds, 6),
            "request_id": answer.request_id,
        }
    )


def _moment(answer: Answer) -> str:
    seconds, ns = divmod(answer.began_ns, 10**9)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{ns // 10**6:03d}Z"
