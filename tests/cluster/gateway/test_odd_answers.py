"""Instances that answer with what no engine sends: it is passed on or refused, and is no fault of the gateway."""

from __future__ import annotations

import contextlib
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from cluster_stand_in import StandIn
from gateway_fixtures import NAME, GatewayProcess

Start = Callable[..., GatewayProcess]


@contextmanager
def answering(cluster: StandIn, kind: str, *pieces: bytes, status: int = 200) -> Iterator[None]:
    """An instance of the model that gives this answer to everything."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(sum(map(len, pieces))))
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the gateway may have seen enough
                for piece in pieces:
                    self.wfile.write(piece)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    cluster.deploy(NAME)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,)).start()
        cluster.add(NAME, "one", f"http://127.0.0.1:{server.server_port}")
        try:
            yield
        finally:
            server.shutdown()


@pytest.mark.parametrize("number", ["1e400", "1e30", "-5", "NaN", '"7"', "1" + "0" * 30])
def test_wrong_numbers_of_tokens_are_not_counted(start_gateway: Start, cluster: StandIn, number: str) -> None:
    usage = f'"usage": {{"prompt_tokens": {number}, "completion_tokens": 3}}'
    with answering(cluster, "application/json", f'{{"choices": [], {usage}}}'.encode()):
        gateway = start_gateway()
        status, _ = gateway.post("/v1/completions", {"model": NAME, "prompt": "a", "max_tokens": 3})
        assert status == 200
        assert gateway.metric("medusa_gateway_tokens_total", model=NAME) == 0
        assert "failed" not in gateway.output()


@pytest.mark.parametrize(
    "event", ['{"choices": [{"index": 1e400, "text": "a"}]}', '{"choices": [{"index": ' + "[" * 100_000 + "}"]
)
def test_an_event_that_cannot_be_read_is_the_instances_fault(
    start_gateway: Start, cluster: StandIn, event: str
) -> None:
    with answering(cluster, "text/event-stream", f"data: {event}\n\n".encode()):
        gateway = start_gateway("--hold-s", "1")
        connection = gateway.connection()
        body = json.dumps({"model": NAME, "prompt": "a", "max_tokens": 3, "stream": True})
        connection.request("POST", "/v1/completions", body)
        answer = connection.getresponse().read()
        connection.close()
        assert b"lost" in answer, answer
        assert "Traceback" not in gateway.output()


def test_an_answer_that_is_too_large_is_refused_and_its_instance_gets_more_requests(
    start_gateway: Start, cluster: StandIn
) -> None:
    with answering(cluster, "application/json", *[bytes(1 << 20)] * 257):
        gateway = start_gateway("--hold-s", "5")
        for _ in range(2):
            status, answer = gateway.post("/v1/completions", {"model": NAME, "prompt": "a"})
            assert (status, answer["error"]["code"]) == (400, "answer_too_large"), answer
            assert "at most 256 MiB" in answer["error"]["message"]
        assert gateway.metric("medusa_gateway_retries_total") == 0
        assert len(cluster.calls) == 2


def test_a_stream_whose_event_is_too_large_ends_with_an_error_and_is_run_once(
    start_gateway: Start, cluster: StandIn
) -> None:
    first = b'data: {"choices": [{"index": 0, "text": "a"}]}\n\n'
    with answering(cluster, "text/event-stream", first, b"data: ", *[b"a" * (1 << 20)] * 129):
        gateway = start_gateway("--hold-s", "5")
        with contextlib.closing(gateway.connection()) as connection:
            connection.request("POST", "/v1/completions", json.dumps({"model": NAME, "prompt": "a", "stream": True}))
            events = connection.getresponse().read().split(b"\n\n")
        assert events[0] + b"\n\n" == first
        assert b'"code":"answer_too_large"' in events[1]
        assert events[2:] == [b"data: [DONE]", b""]
        assert gateway.metric("medusa_gateway_retries_total") == 0
        assert len(cluster.calls) == 1


@pytest.mark.parametrize("code", ["answer_memory", "body_memory"])
def test_an_instance_whose_memory_is_taken_is_not_lost(start_gateway: Start, cluster: StandIn, code: str) -> None:
    """A few large bodies once had the gateway pause the instance, and say of later ones that it was lost."""
    error = {"error": {"message": "try again later", "type": "t", "param": None, "code": code}}
    with answering(cluster, "application/json", json.dumps(error).encode(), status=503):
        gateway = start_gateway("--hold-s", "5")
        for _ in range(2):
            assert gateway.post("/v1/completions", {"model": NAME, "prompt": "a"}) == (503, error)
        assert gateway.metric("medusa_gateway_retries_total") == 0
        assert len(cluster.calls) == 2
