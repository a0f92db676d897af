"""AWS Lambda: a container image whose entry point serves the function, and passes Lambda's events on to it as requests.

``python -m medusa_adapters.platforms.lambda_`` starts `medusa serve` on the loopback interface and then AWS' runtime
interface client (the package awslambdaric), which asks Lambda for events and calls ``handler`` with each of them.
Source: docs.aws.amazon.com/lambda, "Using the Lambda runtime API" and "Invoking functions with a function URL".
"""

from __future__ import annotations

import base64
import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote, urlencode

if TYPE_CHECKING:
    import http.client

    from medusa_handler.platform import Platform
    from medusa_runtime.config import Settings

_PORT = 8080
_LOOK_S = 0.005
_END_S = 1.0  # how long after its connection breaks the server may take to end
_DRAIN_S = 0.2  # Lambda lets a process go on for 300 ms at most
_MARGIN_S = 0.5  # an answer must reach Lambda before the function's own time is over
_REMAINING = "X-Lambda-Remaining-Ms"
_WARM = "provisioned-concurrency"
_PATH_CHARACTERS = "/%:@!$&'()*+,;="  # allowed in a path, beside letters, digits and -._~ (RFC 3986, section 3.3)
_server: Server | None = None  # awslambdaric calls a function of a module, which has no other place for it


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {"MEDUSA_DRAIN": f"{_DRAIN_S:g}"}


def platform(settings: Settings, environ: Mapping[str, str]) -> Platform:
    from medusa_handler.platform import Platform

    from .negotiation import collect_stream

    return Platform(
        name="lambda",
        translate_result=lambda request, result: collect_stream(result),
        timeout_s=_timeout_s,
        streams=False,
        early_heartbeats=False,
    )


def _timeout_s(headers: Mapping[str, str]) -> float | None:
    """Return how many seconds the event has left. ``handler`` sets the header, and replaces a caller's."""
    given = headers.get(_REMAINING, "")
    return max(0.1, int(given) / 1000 - _MARGIN_S) if given.isdigit() else None


class Call(NamedTuple):
    """An event as a request. ``direct`` says that the event was not an HTTP request but any JSON value."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    direct: bool = False
    multi_value: bool = False  # ALB may ask for lists of values, and then takes nothing else


def read_event(event: Any) -> Call:
    """Read the event of a function URL or HTTP API (2.0), a REST API or load balancer (1.0), or a direct call."""
    if not isinstance(event, dict) or "requestContext" not in event:
        return Call("POST", "/", {"Content-Type": "application/json"}, json.dumps(event).encode(), direct=True)
    text = event.get("body") or ""
    body = base64.b64decode(text) if event.get("isBase64Encoded") else text.encode()
    if event.get("version") == "2.0":
        described, query = event["requestContext"]["http"], event.get("rawQueryString") or ""
        headers = dict(event.get("headers") or {})
        if event.get("cookies"):
            headers["cookie"] = "; ".join(event["cookies"])
        return Call(described["method"], _target(event.get("rawPath"), query), headers, body)
    many = event.get("multiValueHeaders")
    headers = {name: ", ".join(values) for name, values in many.items()} if many else dict(event.get("headers") or {})
    parameters = event.get("multiValueQueryStringParameters") or event.get("queryStringParameters") or {}
    if "elb" in event["requestContext"]:  # a load balancer does not decode them
        pairs = [(name, value) for name, given in parameters.items() for value in _listed(given)]
        query = "&".join(f"{name}={value}" for name, value in pairs)
    else:
        query = urlencode(parameters, doseq=True)
    multi_value = many is not None and "headers" not in event
    return Call(event["httpMethod"], _target(event.get("path"), query), headers, body, multi_value=multi_value)


def _listed(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value]


def _target(path: str | None, query: str) -> str:
    # The path may be decoded, with spaces or letters that a request line cannot have. Or it is encoded, so % is kept.
    return quote(path or "/", _PATH_CHARACTERS) + (f"?{query}" if query else "")


def write_response(call: Call, status: int, headers: list[tuple[str, str]], body: bytes) -> Any:
    """Return the response in the form that the event's source reads. A direct call gets the value alone.

    Raises RuntimeError for a direct call that failed, so that Lambda counts an error and may try again.
    """
    if call.direct:
        text = body.decode(errors="replace")
        if status >= 400:
            raise RuntimeError(f"the function answered {status}: {text}")
        return _value(text)
    try:
        text, encoded = body.decode(), False
    except UnicodeDecodeError:
        text, encoded = base64.b64encode(body).decode(), True
    many: dict[str, list[str]] = {}
    for name, value in headers:
        many.setdefault(name.lower(), []).append(value)
    response: dict[str, Any] = {"statusCode": status, "body": text, "isBase64Encoded": encoded}
    if call.multi_value:
        return {**response, "multiValueHeaders": many, "statusDescription": str(status)}
    cookies = many.pop("set-cookie", None)
    response["headers"] = {name: ", ".join(values) for name, values in many.items()}
    return {**response, "cookies": cookies} if cookies else response


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


class Server:
    """`medusa serve` on a port of 127.0.0.1. It ends with this process."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        from medusa_runtime.process import die_with_parent

        self._port = int(environ.get("PORT") or _PORT)
        self._token = environ.get("MEDUSA_TOKEN")
        command = [sys.executable, "-m", "medusa_adapters", "serve", "--host", "127.0.0.1", "--port", str(self._port)]
        import subprocess  # imported here, like http.client below, because no start on another platform needs it

        self._process = subprocess.Popen(
            command,
            env={**environ, "MEDUSA_PLATFORM": "lambda"},
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )

    def wait_ready(self) -> None:
        """Wait until the model is there. Raises SystemExit if the server has ended."""
        while self._status("/readyz") != 200:
            time.sleep(_LOOK_S)

    def ask(self, call: Call, *, request_id: str, remaining_ms: int) -> tuple[int, list[tuple[str, str]], bytes]:
        """Send a request; return the answer's status, headers and body. The server holds it while the model loads."""
        import http.client  # 30 ms, which every start on another platform would pay

        headers = {name: value for name, value in call.headers.items() if name.lower() not in _OWN_HEADERS}
        headers |= {_REMAINING: str(remaining_ms), "X-Request-Id": request_id}
        if call.direct and self._token:  # Lambda has checked who may call it
            headers["Authorization"] = f"Bearer {self._token}"
        connection = self._connect(max(1.0, remaining_ms / 1000))
        try:
            connection.request(call.method, call.path, call.body, headers)
            answer = connection.getresponse()
            kept = [(name, value) for name, value in answer.getheaders() if name.lower() not in _HOP_HEADERS]
            return answer.status, kept, answer.read()
        except (OSError, http.client.HTTPException):
            self._check(_END_S)
            raise
        finally:
            connection.close()

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        import http.client

        deadline = time.monotonic() + timeout_s
        while True:
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)
            try:
                connection.connect()
                return connection
            except OSError:
                self._check()
                if time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_S)

    def _status(self, path: str) -> int:
        connection = self._connect(60.0)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            self._check()
            return 503
        finally:
            connection.close()

    def _check(self, wait_s: float = 0.0) -> None:
        """Raise SystemExit if the server has ended, or ends within ``wait_s``: Lambda then makes a new sandbox."""
        from subprocess import TimeoutExpired

        with contextlib.suppress(TimeoutExpired):
            status = self._process.wait(wait_s)
            raise SystemExit(f"medusa serve ended with status {status}; its log is above")


_OWN_HEADERS = ("host", "content-length", "transfer-encoding", "connection", _REMAINING.lower(), "x-request-id")
_HOP_HEADERS = ("connection", "keep-alive", "transfer-encoding", "content-length", "date", "server")


def handler(event: Any, context: Any) -> Any:
    """Answer one event; awslambdaric calls this. ``context`` has the event's id, and what is left of its time."""
    global _server
    if _server is None:
        _server = Server(os.environ)
    call = read_event(event)
    answer = _server.ask(call, request_id=context.aws_request_id, remaining_ms=context.get_remaining_time_in_millis())
    return write_response(call, *answer)


def main() -> None:
    """Start the server, then ask Lambda for events until the sandbox ends."""
    global _server
    try:
        from awslambdaric.__main__ import main as ask_for_events
    except ModuleNotFoundError:
        raise SystemExit(
            "medusa: expected the package awslambdaric in the image, found none; add it to requirements.txt"
        ) from None
    _server = Server(os.environ)
    if os.environ.get("AWS_LAMBDA_INITIALIZATION_TYPE") == _WARM:
        # Lambda stops all processes between the start and the first event, and so would stop a load half way.
        _server.wait_ready()
    ask_for_events([sys.argv[0], "medusa_adapters.platforms.lambda_.handler"])


if __name__ == "__main__":
    # The same module that awslambdaric imports, not a second one called __main__.
    from medusa_adapters.platforms import lambda_

    lambda_.main()
