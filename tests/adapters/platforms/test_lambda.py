"""Lambda: AWS' own runtime interface client against a runtime API, with a real `medusa serve` behind it."""

from __future__ import annotations

import base64
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from medusa_adapters.platforms.lambda_ import read_event, write_response

HANDLER = """
def handle(request):
    if request.path == "/fail":
        raise ValueError("no")
    if request.path == "/bytes":
        return bytes([0, 255, 128])
    if request.path == "/stream":
        return iter([{"part": 1}, {"part": 2}])
    if request.path == "/slow":
        import time
        time.sleep(30)
    return {"path": request.path, "query": dict(request.query), "body": request.body.decode(), "id": request.id}
"""


class RuntimeApi(BaseHTTPRequestHandler):
    """The two calls of Lambda's runtime API (2018-06-01) that a function makes: the next event, and its result."""

    protocol_version = "HTTP/1.1"
    events: queue.Queue[tuple[str, Any, float]]
    results: queue.Queue[tuple[str, str, Any]]

    def do_GET(self) -> None:
        name, event, limit_s = self.events.get()
        body = json.dumps(event).encode()
        self.send_response(200)
        self.send_header("Lambda-Runtime-Aws-Request-Id", name)
        self.send_header("Lambda-Runtime-Deadline-Ms", str(int((time.time() + limit_s) * 1000)))
        self.send_header("Lambda-Runtime-Invoked-Function-Arn", "arn:aws:lambda:us-east-1:123456789012:function:fn")
        self.send_header("Lambda-Runtime-Trace-Id", "Root=1-5bef4de7-ad49b0e87f6ef6c87fc2e700;Sampled=0")
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        *_, name, kind = self.path.split("/")
        self.results.put((name, kind, json.loads(body)))
        self.send_response(202)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


class Sandbox:
    """A Lambda function that runs, and the runtime API around it."""

    def __init__(self, folder: Path, **environ: str) -> None:
        pytest.importorskip("awslambdaric", reason="Lambda's runtime interface client is not installed")
        folder.joinpath("handler.py").write_text(HANDLER)
        self.events: queue.Queue[tuple[str, Any, float]] = queue.Queue()
        self.results: queue.Queue[tuple[str, str, Any]] = queue.Queue()
        api = type("Api", (RuntimeApi,), {"events": self.events, "results": self.results})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), api)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("MEDUSA_", "AWS_"))}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "medusa_adapters.platforms.lambda_"],
            cwd=folder,
            env=clean
            | {
                "AWS_LAMBDA_RUNTIME_API": "{}:{}".format(*self._server.server_address[:2]),
                "MEDUSA_HANDLER": "handler.py",
                "PORT": str(port),
                "AWS_LAMBDA_FUNCTION_NAME": "fn",
                "AWS_LAMBDA_FUNCTION_VERSION": "1",
                "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "512",
                "AWS_LAMBDA_LOG_GROUP_NAME": "g",
                "AWS_LAMBDA_LOG_STREAM_NAME": "s",
            }
            | environ,
        )

    def invoke(self, event: Any, *, limit_s: float = 60.0) -> tuple[str, Any]:
        """``response`` or ``error``, and what was sent."""
        name = f"event-{time.monotonic_ns()}"
        self.events.put((name, event, limit_s))
        answered, kind, body = self.results.get(timeout=240)
        assert answered == name
        return kind, body

    def close(self) -> None:
        self.process.kill()
        self.process.wait(120)
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    sandbox = Sandbox(tmp_path_factory.mktemp("lambda"))
    yield sandbox
    sandbox.close()


def url_event(path: str, method: str = "POST", query: str = "", **more: Any) -> dict[str, Any]:
    """Return what a function URL sends."""
    context = {"http": {"method": method, "path": path}}
    headers = {"content-type": "application/json", "host": "x.lambda-url.us-east-1.on.aws"}
    given = {"version": "2.0", "rawPath": path, "rawQueryString": query, "headers": headers, "requestContext": context}
    return given | more


def test_a_direct_call_is_the_functions_value(sandbox: Sandbox) -> None:
    kind, body = sandbox.invoke({"prompt": "hello"})
    assert kind == "response"
    assert (body["path"], json.loads(body["body"])) == ("/", {"prompt": "hello"})
    assert body["id"].startswith("event-")


def test_a_function_urls_request_keeps_path_query_and_body(sandbox: Sandbox) -> None:
    text = base64.b64encode("grüß".encode()).decode()
    kind, answer = sandbox.invoke(url_event("/a/b", query="x=1&y=a%20b", body=text, isBase64Encoded=True))
    assert (kind, answer["statusCode"], answer["isBase64Encoded"]) == ("response", 200, False)
    assert answer["headers"]["content-type"] == "application/json"
    body = json.loads(answer["body"])
    assert (body["path"], body["body"]) == ("/a/b", "grüß")
    assert body["query"] == {"x": "1", "y": "a b"}


def test_bytes_streams_and_failures(sandbox: Sandbox) -> None:
    _, answer = sandbox.invoke(url_event("/bytes"))
    assert answer["isBase64Encoded"]
    assert base64.b64decode(answer["body"]) == bytes([0, 255, 128])
    _, answer = sandbox.invoke(url_event("/stream"))
    assert json.loads(answer["body"]) == [{"part": 1}, {"part": 2}]
    kind, answer = sandbox.invoke(url_event("/fail"))
    assert (kind, answer["statusCode"]) == ("response", 500)


def test_an_event_ends_before_its_time_is_over(sandbox: Sandbox) -> None:
    began = time.monotonic()
    kind, answer = sandbox.invoke(url_event("/slow"), limit_s=3)
    assert (kind, answer["statusCode"]) == ("response", 504)
    assert time.monotonic() - began < 25


def test_provisioned_concurrency_waits_until_the_function_is_ready(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, AWS_LAMBDA_INITIALIZATION_TYPE="provisioned-concurrency")
    try:
        assert sandbox.invoke({})[0] == "response"
    finally:
        sandbox.close()


def test_a_server_that_cannot_start_ends_the_sandbox(tmp_path: Path) -> None:
    sandbox = Sandbox(tmp_path, MEDUSA_HANDLER="none.py")
    try:
        for number in range(2):  # the first may still be told that the function could not be loaded
            sandbox.events.put((f"event-{number}", {}, 60.0))
        assert sandbox.process.wait(60) != 0
        assert sandbox.results.get(timeout=240)[1] == "error"
    finally:
        sandbox.close()


def test_rest_apis_and_load_balancers() -> None:
    rest = {"requestContext": {"stage": "prod"}, "httpMethod": "GET", "path": "/p", "headers": {"a": "b"}}
    call = read_event(rest | {"multiValueQueryStringParameters": {"q": ["a b", "c"]}})
    assert call[:4] == ("GET", "/p?q=a+b&q=c", {"a": "b"}, b"")
    balancer = {"requestContext": {"elb": {}}, "httpMethod": "POST", "path": "/p", "body": "x"}
    call = read_event(balancer | {"multiValueHeaders": {"a": ["b", "c"]}, "queryStringParameters": {"q": "a%20b"}})
    assert call[:4] == ("POST", "/p?q=a%20b", {"a": "b, c"}, b"x")
    answer = write_response(call, 200, [("Set-Cookie", "a=1"), ("Set-Cookie", "b=2")], b"y")
    assert answer["multiValueHeaders"] == {"set-cookie": ["a=1", "b=2"]}
    url = read_event(url_event("/", body="x", cookies=["a=1", "b=2"]))
    assert url.headers["cookie"] == "a=1; b=2"
    assert write_response(url, 200, [("Set-Cookie", "a=1"), ("X", "1")], b"y")["cookies"] == ["a=1"]


@pytest.mark.parametrize(
    ("given", "sent"),
    [("/a b", "/a%20b"), ("/käse", "/k%C3%A4se"), ("/what?#", "/what%3F%23"), ("/a%20b;c=1", "/a%20b;c=1"), ("", "/")],
)
def test_a_decoded_path_is_encoded_again(given: str, sent: str) -> None:
    assert read_event(url_event(given, query="q=a%20b")).path == f"{sent}?q=a%20b"


def test_a_direct_call_that_fails_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="answered 500: no"):
        write_response(read_event({"a": 1}), 500, [], b"no")
    assert write_response(read_event([1]), 200, [], b"plain text") == "plain text"
