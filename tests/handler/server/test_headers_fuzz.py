"""What callers write into traceparent, Origin, paths and ids: nothing breaks, or gets into a log or a header."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from fuzzing import fuzz
from hypothesis import strategies as st
from medusa_handler.server.access_log import with_access_log
from medusa_handler.server.cors import with_cors
from medusa_handler.server.tracing import Tracer

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
_PARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-0[01]")
_UNPRINTED = re.compile(r"[^\x20-\x7e]")


def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    start_response("200 OK", [("X-Request-Id", environ.get("HTTP_X_REQUEST_ID", ""))])
    return [b"x"]


def call(app: Any, **environ: str) -> list[tuple[str, str]]:
    """The headers of an answer."""
    headers: list[tuple[str, str]] = []
    given = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "REMOTE_ADDR": "10.0.0.1", **environ}
    body = app(given, lambda _, found, *rest: headers.extend(found))
    list(body)
    getattr(body, "close", lambda: None)()
    return headers


def test_fuzzed_traceparents() -> None:
    passed_on: list[dict[str, Any]] = []

    def handler(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        passed_on.append(environ)
        return answer(environ, start_response)

    tracer = Tracer(SimpleNamespace(ready=False))  # type: ignore[arg-type]
    app = tracer.around(handler)

    def check(data: bytes) -> None:
        given = data.decode("latin-1")
        call(app, HTTP_TRACEPARENT=given, HTTP_TRACESTATE="a=b", PATH_INFO=f"/{given}")
        environ = passed_on.pop()
        assert _PARENT.fullmatch(environ["HTTP_TRACEPARENT"])
        assert ("HTTP_TRACESTATE" in environ) == (environ["HTTP_TRACEPARENT"][3:35] in given)

    try:
        fuzz(st.binary(max_size=80), check, [PARENT.encode(), PARENT.replace("00-", "cc-").encode() + b"-more" * 999])
        assert all(len(span.name) < 300 for span in tracer.sender.pending)
    finally:
        tracer.sender.pending.clear()
        tracer.sender._stopping.set()


def test_a_traceparent_of_version_00_has_nothing_behind_its_flags() -> None:
    """Trace Context, section 3.2.2: only a later version may have more fields."""
    for header, kept in ((PARENT, True), (f"{PARENT}-more", False), (f"cc{PARENT[2:]}-more", True)):
        passed_on: list[dict[str, Any]] = []
        tracer = Tracer(SimpleNamespace(ready=False))  # type: ignore[arg-type]
        app = tracer.around(
            lambda environ, start, passed_on=passed_on: (passed_on.append(environ), answer(environ, start))[1]
        )
        call(app, HTTP_TRACEPARENT=header)
        tracer.sender.pending.clear()
        tracer.sender._stopping.set()
        assert (passed_on[0]["HTTP_TRACEPARENT"][3:35] == PARENT[3:35]) is kept, header


@pytest.mark.parametrize("form", ["text", "json"])
def test_fuzzed_lines_of_the_access_log(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request is one line of printable characters, and the fields of a line cannot be moved."""
    app = with_access_log(answer, form)

    def check(data: bytes) -> None:
        stream = io.StringIO()
        monkeypatch.setattr("sys.stderr", stream)
        call(app, PATH_INFO="/" + data.decode("latin-1"))
        monkeypatch.undo()
        line = stream.getvalue().removesuffix("\n")
        assert not _UNPRINTED.search(line)
        if form == "json":
            assert json.loads(line)["path"] == "/" + data.decode("latin-1")
        else:
            assert len(line.split(" ")) == 10
            assert line.split(" ")[4] == "200"

    fuzz(st.binary(max_size=60), check, [b"a\nb", b"\x1b[2Jx", b"\x9b31m", b'" 500 "', "\u2028".encode()])


def test_fuzzed_origins_are_never_reflected() -> None:
    """Only an origin of the list is named, never with credentials, and caches are told that it matters."""
    allowed = ("https://a.example", "http://localhost:3000")
    listed, every = with_cors(answer, ", ".join(allowed)), with_cors(answer, "*")

    def check(data: bytes) -> None:
        origin = data.decode("latin-1")
        for method in ("GET", "OPTIONS"):
            asked = {"REQUEST_METHOD": method, "HTTP_ORIGIN": origin, "HTTP_ACCESS_CONTROL_REQUEST_METHOD": "POST"}
            for app, known in ((listed, allowed), (every, ("*",))):
                found = call(app, **asked)
                shared = [value for name, value in found if name == "Access-Control-Allow-Origin"]
                assert set(shared) <= set(known)
                assert shared in ([], [origin], ["*"])
                assert not any(name == "Access-Control-Allow-Credentials" for name, _ in found)
                assert ("Vary", "Origin") in found or not shared

    seeds = [b"null", b"https://a.example", b"https://a.example.evil", b"https://evil/https://a.example", b"file://"]
    fuzz(st.binary(max_size=30), check, seeds)
