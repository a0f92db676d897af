"""Tokens that rotate, cross-origin requests, the access log and traces, against the real server."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import medusa_runtime
import pytest
from medusa_handler.server.tokens import Tokens
from medusa_runtime.errors import ConfigError
from span_collector import Collector, collector

Serve = Callable[..., Any]
__all__ = ["collector"]

PAGE = "https://app.example"


def bearing(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_tokens_of_a_file_are_rotated_without_a_restart(serve: Serve, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nold\n\nother\n")
    served = serve(api_key_file=str(file), token="own")

    def status(token: str) -> int:
        return int(served.request("GET", "/v1/models", headers=bearing(token))[0])

    assert [status(token) for token in ("old", "other", "own", "new", "# of the team", "")] == [
        200,
        200,
        200,
        401,
        401,
        401,
    ]
    assert served.request("GET", "/v1/models")[0] == 401
    assert served.request("GET", "/livez")[0] == 200
    file.write_text("other\nnew\n")
    served.until(lambda: status("new") == 200)
    assert (status("old"), status("other")) == (401, 200)
    file.write_text("")  # cannot be meant: what was valid stays so
    time.sleep(1.2)
    assert status("new") == 200
    os.unlink(file)
    time.sleep(1.2)
    assert status("new") == 200
    assert "new" not in served.output().replace("newer", "")


def test_strangers_without_a_token_leave_no_word_in_the_log(serve: Serve) -> None:
    served = serve(token="secret")
    served.wait_ready()
    before = served.output()
    for method in ("GET", "HEAD", "POST", "OPTIONS"):
        with contextlib.closing(served.connect()) as connection:
            connection.request(method, "/v1/models")
            assert connection.getresponse().status == 401
    assert served.output() == before


@pytest.mark.parametrize("text", [None, "", "# none\n", "two words\n", "naïve\n"])
def test_a_file_without_tokens_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"--api-key-file=.*: expected"):
        Tokens(None, str(file))


def test_pages_of_other_origins_may_call(serve: Serve) -> None:
    served = serve(cors_origins=f"{PAGE},http://localhost:3000", token="secret")
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    status, _, headers = served.request("OPTIONS", "/v1/chat/completions", headers=asked)
    assert status == 204
    assert headers["access-control-allow-origin"] == PAGE
    assert headers["access-control-allow-headers"] == "authorization"
    assert "POST" in headers["access-control-allow-methods"]
    status, _, headers = served.request("GET", "/v1/models", headers={"Origin": PAGE, **bearing("secret")})
    assert (status, headers["access-control-allow-origin"], headers["vary"]) == (200, PAGE, "Origin")
    refused = served.request("GET", "/v1/models", headers={"Origin": PAGE})
    assert refused[0] == 401
    assert refused[2]["access-control-allow-origin"] == PAGE  # so that the page can read why
    for probe in ("/livez", "/readyz"):
        assert served.request("GET", probe, headers={"Origin": PAGE})[2]["access-control-allow-origin"] == PAGE
    for origin in ("https://evil.example", f"{PAGE}.evil.example", "null"):
        assert "access-control-allow-origin" not in served.request("GET", "/livez", headers={"Origin": origin})[2]
        status, _, headers = served.request("OPTIONS", "/v1/models", headers={**asked, "Origin": origin})
        assert "access-control-allow-origin" not in headers


def test_a_page_can_read_what_the_acceptor_refuses(serve: Serve) -> None:
    served = serve(cors_origins=PAGE, read_timeout_s=1.0, handler="function/handler.py:anything")
    served.wait_ready()
    post = b"POST /anything HTTP/1.1\r\nHost: a\r\n"
    named, stranger = f"oRigin: {PAGE}\r\n".encode(), b"Origin: https://evil.example\r\n"
    cases = (
        (post + named + b"X: " + b"a" * 40_000, 431, True),
        (post + named, 408, True),
        (post + named + b"Content-Length: 99\r\n\r\nten bytes.", 408, True),
        (post + stranger + b"Content-Length: 99\r\n\r\nten bytes.", 408, False),
        (post + named + stranger, 408, False),
        (post + b"Content-Length: 99\r\n\r\n\r\n" + named, 408, False),  # in the body
        (b"\r\n\x16\x03\x01", 400, False),
    )
    with contextlib.ExitStack() as stack:  # all of them wait at the same time
        address = ("127.0.0.1", served.port)
        connections = [stack.enter_context(socket.create_connection(address, timeout=60)) for _ in cases]
        for connection, (sent, _, _) in zip(connections, cases, strict=True):
            connection.sendall(sent)
        for connection, (sent, status, readable) in zip(connections, cases, strict=True):
            answer = stack.enter_context(connection.makefile("rb"))
            assert int(answer.readline().split()[1]) == status, sent[:90]
            headers = http.client.parse_headers(answer)
            assert headers["vary"] == "Origin"
            assert headers["access-control-allow-origin"] == (PAGE if readable else None), sent[:90]
            assert ("Retry-After" in headers.get("access-control-expose-headers", "")) is readable


@pytest.mark.parametrize("origins", [PAGE, "*"])
def test_a_cache_keeps_what_other_origins_are_answered_apart(serve: Serve, origins: str) -> None:
    served = serve(cors_origins=origins)
    for sent in ({}, {"Origin": "https://evil.example"}, {"Origin": PAGE}):
        assert served.request("GET", "/v1/models", headers=sent)[2]["vary"] == "Origin", sent


def test_without_the_setting_there_is_no_cors(serve: Serve) -> None:
    headers = serve().request("GET", "/v1/models", headers={"Origin": PAGE})[2]
    assert not any(name.startswith("access-control") for name in headers)


def test_each_answer_is_a_line_of_the_access_log(serve: Serve) -> None:
    served = serve(access_log="json")
    served.complete()
    served.until(lambda: "\n" in served.output())  # a line is written when its answer has ended
    served.request("GET", "/v1/no%0Athing?key=secret", headers={"X-Request-Id": "mine"})
    served.until(lambda: len(served.output().splitlines()) >= 2)
    first, second = (json.loads(line) for line in served.output().splitlines()[:2])
    assert (first["method"], first["path"], first["status"]) == ("POST", "/v1/completions", 200)
    assert first["bytes"] > 50
    assert first["seconds"] >= 0
    assert (second["path"], second["status"], second["request_id"]) == ("/v1/no\nthing", 404, "mine")
    assert "secret" not in served.output()
    text = serve(access_log="text")
    assert text.request("GET", "/v1/no%0Athing")[0] == 404
    text.until(lambda: "\n" in text.output())
    assert "GET /v1/no\\nthing 404 " in text.output()


def test_requests_and_the_start_are_spans(serve: Serve, collector: Collector) -> None:
    served = serve(traces="otlp")
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    served.request("GET", "/v1/models", headers={"traceparent": f"00-{trace}-{parent}-01"})
    served.request("GET", "/v1/models", headers={"traceparent": f"00-{trace}-{parent}-00"})  # not sampled
    served.request("GET", "/v1/nothing", headers={"traceparent": "nonsense"})
    served.request("GET", "/v1/" + "x" * 3000)
    served.until(lambda: len(collector.named("GET /v1/nothing")) == 1)
    served.until(lambda: len(collector.named("GET /v1/" + "x" * 252)) == 1)  # not all of a caller's path is kept
    [span] = collector.named("GET /v1/models")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (trace, parent)
    assert {a.key: a.value.int_value for a in span.attributes}["http.response.status_code"] == 200
    assert span.end_time_unix_nano >= span.start_time_unix_nano > 1.6e18
    assert collector.named("GET /v1/nothing")[0].parent_span_id == b""
    [start] = collector.named("cold start")
    stages = [span for span in collector.spans if span.parent_span_id == start.span_id]
    assert {"server", "app"} <= {stage.name for stage in stages}
    assert collector.service == "words"
    served.complete()
    assert served.stop() == 0
    assert len(collector.named("POST /v1/completions")) == 1  # sent before the end


def test_a_function_passes_the_trace_on(serve: Serve, collector: Collector) -> None:
    served = serve(handler="traced/handler.py", traces="otlp")
    trace = "0af7651916cd43dd8448eb211c80319c"
    given = served.request("POST", "/", b"", {"traceparent": f"00-{trace}-b7ad6b7169203331-01"})[1]["traceparent"]
    served.until(lambda: len(collector.named("POST /")) == 1)
    assert given == f"00-{trace}-{collector.named('POST /')[0].span_id.hex()}-01"


def test_without_the_setting_a_trace_is_passed_on_as_it_came(serve: Serve) -> None:
    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = serve(handler="traced/handler.py").request("POST", "/", b"", {"traceparent": given})[1]
    assert answer == {"traceparent": given, "imported": []}


def test_two_slashes_lead_nowhere_else(serve: Serve) -> None:
    """A redirect would be to the client's Host, by http, and so take the token and the prompt off an encrypted way."""
    served = serve()
    for method, path in (("GET", "/v1//models"), ("POST", "/v1//completions"), ("GET", "//evil.example//x")):
        status, body, headers = served.request(method, path, {"prompt": "a"}, {"Host": "evil.example"})
        assert (status, body["error"]["code"]) == (404, "not_found"), path
        assert "location" not in headers
    function = serve(handler="function/handler.py:handle")
    function.wait_ready()
    assert function.request("POST", "/a//b", {"name": "x"})[1]["path"] == "/a//b"


def test_a_page_cannot_send_what_its_browser_does_not_ask_for(serve: Serve) -> None:
    """Otherwise any page that a browser shows could use a server without a token that the browser's machine reaches."""
    served = serve(cors_origins=PAGE)
    served.wait_ready()
    body = {"prompt": "a b c", "max_tokens": 1}
    for path in ("/v1/completions", "/"):
        for kind in (
            "text/plain;charset=UTF-8",
            "application/x-www-form-urlencoded",
            "Multipart/Form-Data",
        ):
            for origin, status in (("https://evil.example", 415), ("null", 415), (PAGE, 200)):
                found = served.request("POST", path, body, {"Content-Type": kind, "Origin": origin})
                assert found[0] == status, (path, kind, origin, found)
            assert served.request("POST", path, body, {"Content-Type": kind})[0] == 200  # curl -d
            asked = {"Content-Type": kind, "Origin": "https://evil.example", "Authorization": "Bearer any"}
            assert served.request("POST", path, body, asked)[0] == 200
            for site, status in (("same-origin", 200), ("none", 200), ("same-site", 415), ("cross-site", 415)):
                asked = {"Content-Type": kind, "Origin": "https://its-own.example", "Sec-Fetch-Site": site}
                assert served.request("POST", path, body, asked)[0] == status, (path, kind, site)
        asked = {"Content-Type": "application/json", "Origin": "https://evil.example"}
        assert served.request("POST", path, body, asked)[0] == 200


def test_the_version_of_a_served_model(serve: Callable[..., Any]) -> None:
    served = serve()
    assert served.request("GET", "/version")[:2] == (200, {"version": medusa_runtime.__version__})
    assert served.request("POST", "/version", {})[0] == 405
