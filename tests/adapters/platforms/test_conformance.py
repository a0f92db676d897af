"""The same functions through every adapter: the same answers, the same refusals, the same end."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from medusa_adapters.platforms.base import ADAPTERS
from medusa_runtime.config import PLATFORMS

Launch = Callable[..., Any]
SECRET = "not-for-anybody"


class Place(NamedTuple):
    """A platform: the environment it is known by, where calls go, and where it asks for readiness."""

    env: dict[str, str]
    path: str
    ready: str


PLACES = {
    "local": Place({"MEDUSA_PLATFORM": "local"}, "/", "/readyz"),
    "knative": Place({"K_SERVICE": "f", "K_REVISION": "f-00001"}, "/", "/readyz"),
    "kserve": Place({"MEDUSA_PLATFORM": "kserve"}, "/", "/v2/health/ready"),
    "openfaas": Place({"fprocess": "medusa serve", "suppress_lock": "true", "metrics_port": "0"}, "/", "/_/ready"),
    "sagemaker": Place({"SAGEMAKER_REGION": "eu-west-1"}, "/invocations", "/ping"),
}


def test_each_platform_can_be_named_and_is_recognized() -> None:
    assert {*ADAPTERS, "auto"} == {*PLATFORMS}


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> Place:
    return PLACES[request.param]


@pytest.fixture(scope="module")
def instances(launch_module: Launch, place: Place) -> Callable[[str], Any]:
    """One instance per function and platform, started when first asked for."""
    started: dict[str, Any] = {}

    def get(handler: str) -> Any:
        if handler not in started:
            started[handler] = launch_module("--max-body-mb", "1", handler=handler, **place.env)
        return started[handler]

    return get


def test_a_function_gets_json_and_gives_json(instances: Any, place: Place) -> None:
    answer = instances("function/handler.py").request("POST", place.path + "?a=b", {"name": "you"})
    assert answer.status == 200
    assert answer.json == {"hello": "you", "method": "POST", "path": "/", "query": {"a": "b"}}
    assert answer.headers["x-request-id"]
    assert instances("function/handler.py").request("GET", place.ready).status == 200


@pytest.mark.parametrize(
    ("what", "status", "body", "kind"),
    [
        ("list", 200, b'[1, "two"]\n', "application/json"),
        ("str", 200, "text ä".encode(), "text/plain; charset=utf-8"),
        ("bytes", 200, b"\x00\x01", "application/octet-stream"),
        ("none", 204, b"", None),
        ("tuple", 201, b'{"made": 1}\n', "application/json"),
        ("headers", 302, b"moved", "text/plain; charset=utf-8"),
        ("response", 203, b"<p>", "text/html"),
    ],
)
def test_results(instances: Any, place: Place, what: str, status: int, body: bytes, kind: str | None) -> None:
    answer = instances("results/handler.py").request("POST", f"{place.path}?what={what}", b"")
    assert (answer.status, answer.body) == (status, body)
    assert kind is None or answer.headers["content-type"] == kind


def test_a_stream_ends_with_done(instances: Any, place: Place) -> None:
    streaming = instances("streaming/handler.py")
    answer = streaming.request("POST", place.path, b"")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.body == b'data: one\ndata: two\n\ndata: {"three": 3}\n\ndata: [DONE]\n\n'
    assert streaming.request("POST", place.path, b"early").status == 418
    late = streaming.request("POST", place.path, b"late").body
    assert late.endswith(b"data: [DONE]\n\n")
    assert b"internal error" in late
    assert b"secret" not in late


def test_asynchronous_and_lifecycle_and_typed_and_openfaas_functions(instances: Any, place: Place) -> None:
    assert instances("asynchronous/handler.py").request("POST", place.path, b"x").json == {"got": "x"}
    assert instances("lifecycle/handler.py").request("POST", place.path, b"x").body == b"at most 64: x!"
    order = instances("typed/handler.py").request("POST", place.path, {"item": "pen", "count": 2})
    assert (order.json["item"], order.json["count"]) == ("pen", 2)
    faas = instances("openfaas/handler.py").request("POST", place.path + "?q=1", b"x")
    assert (faas.status, faas.json["path"]) == (201, "/")


def test_events(instances: Any, place: Place) -> None:
    events = instances("cloudevent/handler.py")
    attributes = {"ce_specversion": "1.0", "ce_id": "1", "ce_type": "t", "ce_source": "/s"}
    answer = events.request("POST", place.path, {"a": 1}, **attributes)
    assert (answer.json, answer.headers["ce-id"]) == ({"got": {"a": 1}}, "r-1")
    assert events.request("POST", place.path, b"{", content_type="application/cloudevents+json").status == 400


def test_errors_of_a_function(instances: Any, place: Place) -> None:
    failing = instances("failing/handler.py")
    gone = failing.request("POST", place.path, b"gone")
    assert (gone.status, gone.json, gone.headers["x-why"]) == (410, {"error": "it is gone"}, "test")
    for body in (b"raise", b"unsendable"):
        answer = failing.request("POST", place.path, body)
        assert answer.status == 500
        assert list(answer.json) == ["error"]
        for private in (b"Traceback", b"secret-value", b"handler.py", b"KeyError"):
            assert private not in answer.body


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"\xff\xfe{", "application/json", 400),
        (b"", "application/json", 400),
        (b"[" * 50_000, "application/json", 400),
        (b"[" * 200_000, "application/json", 413),  # its values would take more than the memory for bodies
        (b'{"count": 2}', "application/json", 422),
        (b'{"item": "pen", "count": "many"}', "application/json", 422),
        (b" " * 1_100_000, "application/json", 413),
    ],
)
def test_bodies_that_do_not_fit(instances: Any, place: Place, body: bytes, kind: str, status: int) -> None:
    answer = instances("typed/handler.py").request("POST", place.path, body, content_type=kind)
    assert answer.status == status
    assert isinstance(answer.json["error"], str)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"NONSENSE\r\n\r\n", b"400"),
        (b"GET / HTTP/9.9\r\nHost: x\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 9000 + b"\r\n\r\n", b"431"),
        (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", b"414"),
        (b"POST / HTTP/1.1\r\n" + b"".join(b"X-%d: a\r\n" % n for n in range(150)) + b"\r\n", b"431"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", b"501"),
        (b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"400"),
        (b"GET /livez HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\n{}", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nX-A: 1\r\n 2\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nExpect: more\r\n\r\n", b"417"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX Y: 1\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (b"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", b"400"),
    ],
)
def test_what_is_no_http_is_refused_as_json(instances: Any, text: bytes, status: bytes) -> None:
    answer = instances("function/handler.py").raw(text)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == status, answer
    assert b"Connection: close" in head
    assert json.loads(body)["error"]


@pytest.mark.parametrize(
    "fields",
    [
        b"Connection: close, TE\r\nTE: trailers",
        b"Connection: TE\r\nConnection: CLOSE",
        b"Connection: , keep-alive ,close",
    ],
)
def test_any_of_the_connections_options_may_be_close(instances: Any, fields: bytes) -> None:
    answer = instances("function/handler.py").raw(b"GET /metrics HTTP/1.1\r\nHost: x\r\n" + fields + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"Connection: close" in answer


@pytest.mark.parametrize(
    "fields",
    [
        b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
        b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
        b"Connection: closed\r\n",
    ],
)
def test_what_we_do_not_speak_is_not_taken_up_and_costs_nothing(instances: Any, fields: bytes) -> None:
    first = b"POST / HTTP/1.2\r\nHost: x\r\n" + fields + b'Content-Length: 14\r\n\r\n{"name": "me"}'
    last = b"GET http://other/livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = instances("function/handler.py:anything").raw(first + last)
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert b'"bytes": 14' in answer


def test_no_header_moves_a_route(instances: Any) -> None:
    """A proxy beside the function is a local client, which gunicorn itself would let rewrite paths."""
    function = instances("function/handler.py")
    head = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    assert function.raw(head + b"SCRIPT_NAME: /x\r\nPATH_INFO: /timeline\r\n\r\n").endswith(b'{"status": "alive"}\n')
    assert function.raw(head + b"X-Forwarded-Proto: https\r\nX-Forwarded-Ssl: off\r\n\r\n").endswith(b'"alive"}\n')


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="it reads whatever a body's memory has room for")
def test_json_that_is_nested_too_deeply_is_the_clients_mistake(instances: Any, place: Place) -> None:
    answer = instances("function/handler.py").request("POST", place.path, b"[" * 50_000)
    assert (answer.status, answer.json) == (400, {"error": "expected a JSON body: it is nested too deeply"})


def test_clients_of_http_1_0(instances: Any, place: Place) -> None:
    head = f"POST {place.path} HTTP/1.0\r\nContent-Length: 15\r\n\r\n".encode()
    answer = instances("function/handler.py").raw(head + b'{"name": "old"}')
    assert b'"hello": "old"' in answer
    stream = instances("streaming/handler.py").raw(f"POST {place.path} HTTP/1.0\r\nContent-Length: 0\r\n\r\n".encode())
    assert b"chunked" not in stream.lower()
    assert stream.endswith(b"\r\n\r\ndata: one\ndata: two\n\n" + b'data: {"three": 3}\n\ndata: [DONE]\n\n')


def test_a_client_that_vanishes_closes_its_stream(instances: Any, place: Place) -> None:
    streaming = instances("streaming/handler.py")
    (streaming.folder / "closed").unlink(missing_ok=True)
    with contextlib.closing(socket.create_connection(("127.0.0.1", streaming.port))) as client:
        client.sendall(f"POST {place.path} HTTP/1.1\r\nHost: x\r\nContent-Length: 7\r\n\r\nendless".encode())
        assert client.recv(15) == b"HTTP/1.1 200 OK"
    streaming.until(lambda: (streaming.folder / "closed").exists())
    streaming.until(lambda: streaming.metric("medusa_requests_in_flight") == 0)


def test_no_debug_routes(instances: Any) -> None:
    for path in ("/console", "/?__debugger__=yes&cmd=resource&f=style.css", "/static/x", "/env", "/debug/pprof"):
        answer = instances("results/handler.py").request("GET", path)
        assert answer.status == 500, "the function is asked, and knows no such thing"
        assert b"werkzeug" not in answer.body.lower()


def test_the_token_is_asked_for_everywhere_but_at_health(launch: Launch, place: Place) -> None:
    guarded = launch(handler="function/handler.py", MEDUSA_TOKEN=SECRET, **place.env)
    for path in ("/livez", "/readyz", "/startupz", "/health", place.ready):
        assert guarded.request("GET", path).status == 200
    for method, path in (("POST", place.path), ("GET", "/timeline"), ("GET", "/metrics"), ("POST", "/livez")):
        for headers in (
            {}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {SECRET}"},
            {"Authorization": "Bearer \xe4"}, {"Authorization": f"Bearer {SECRET}x"},
        ):  # fmt: skip
            answer = guarded.request(method, path, b'{"name": "a"}', **headers)
            assert answer.status == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json["error"]["code"] == "invalid_api_key"
    allowed = {"Authorization": f"bearer {SECRET}"}
    assert guarded.request("POST", place.path, {"name": "a"}, **allowed).json["hello"] == "a"
    for path in ("/timeline", "/metrics", "/openapi.json"):
        answer = guarded.request("GET", path, **allowed)
        assert answer.status == 200
        assert SECRET.encode() not in answer.body
    assert SECRET not in guarded.output()


def test_sigterm_ends_it_cleanly(launch: Launch, place: Place) -> None:
    env = place.env | ({"healthcheck_interval": "100ms"} if "fprocess" in place.env else {})
    ending = launch(handler="lifecycle/handler.py", **env)
    ending.terminate()
    assert ending.process.wait(60) == 0
    assert (ending.folder / "closed").read_text() == "yes"
    assert list((ending.folder / "tmp").iterdir()) == []
