"""Probes, early requests, limits, heartbeats, clients that leave, and the end of the process."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

Serve = Callable[..., Any]
BODY = {"prompt": "a b", "max_tokens": 5}


def stream(served: Any, **body: Any) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = served.connect()
    sent = json.dumps(BODY | {"stream": True} | body)
    connection.request("POST", "/v1/completions", sent, {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def test_probes_before_and_after_the_model_is_there(serve: Serve) -> None:
    served = serve(ready=False)
    assert served.request("GET", "/livez")[:2] == (200, {"status": "alive"})
    for path in ("/readyz", "/startupz", "/health"):
        status, progress, _ = served.request("GET", path)
        assert status == 503
        assert (progress["status"], progress["state"]) == ("starting", "fetching")
        assert (progress["fetched_bytes"], progress["total_bytes"]) == (250, 1000)
        assert (progress["mb_per_s"], progress["eta_s"]) == (12.5, 3.0)
    served.control(ready=True)
    served.wait_ready()
    assert served.request("GET", "/startupz")[1]["status"] == "ready"


def test_clients_that_close_late_keep_nobody_waiting(serve: Serve) -> None:
    """gunicorn waits two seconds for each in its loop: were that so here, the last answer would take minutes."""
    served = serve()
    with ExitStack() as stack:
        for _ in range(60):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
            client.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert served.request("GET", "/livez")[0] == 200  # or the client gives up, after 30 s


def test_early_requests_are_held_and_answered_in_bounds(serve: Serve) -> None:
    served = serve(ready=False, max_waiting=3)
    with ThreadPoolExecutor(3) as pool:
        held = [pool.submit(served.complete) for _ in range(3)]
        served.until(lambda: served.metric("medusa_requests_held") == 3)
        status, answer, headers = served.complete()
        assert status == 503
        assert answer["error"]["type"] == "service_unavailable_error"
        assert headers["retry-after"] == "3"  # what is left of the fetch
        assert served.request("GET", "/livez")[0] == 200
        served.control(ready=True)
        assert [future.result()[0] for future in held] == [200] * 3
    assert served.metric("medusa_requests_refused_total") == 1


def test_a_hold_ends(serve: Serve) -> None:
    served = serve(ready=False, hold_s=0.3)
    status, answer, headers = served.complete()
    assert status == 503
    assert "0.3 s" in answer["error"]["message"]
    assert headers["retry-after"] == "3"  # what is left of the fetch
    served.until(lambda: served.metric("medusa_engine_cancelled_total") == 1)


def test_an_early_stream_gets_heartbeats(serve: Serve) -> None:
    served = serve(ready=False, heartbeat_s=0.2)
    connection, response = stream(served)
    assert response.status == 200
    assert response.readline() == b": waiting for the model, 0 of 0 MB fetched, about 3 s left\n"
    served.control(ready=True)
    rest = response.read()
    connection.close()
    assert rest.count(b'"text"') == 5
    assert rest.endswith(b"data: [DONE]\n\n")


def test_an_error_before_the_first_token_has_its_status(serve: Serve) -> None:
    served = serve()
    for asked in (False, True):
        status, answer, _ = served.complete(prompt="a " * 200, stream=asked)
        assert status == 400
        assert "the prompt has 200" in answer["error"]["message"]
    served.control(full=True)
    served.until(lambda: served.complete(stream=True)[0] == 429)
    assert served.complete()[2]["retry-after"] == "7"


def test_an_error_inside_a_stream_is_told(serve: Serve) -> None:
    served = serve(token_s=0.02)
    connection, response = stream(served, max_tokens=1000)
    response.readline()
    served.control(lose=True)
    last = response.read().split(b"\n\n")[-3:]
    connection.close()
    assert json.loads(last[0].removeprefix(b"data: "))["error"]["code"] == "Engine.Failed"
    assert last[1:] == [b"data: [DONE]", b""]
    assert served.complete()[0] == 503


def test_a_client_that_leaves_cancels_its_request(serve: Serve) -> None:
    served = serve(token_s=0.02)
    for cancelled, asked in enumerate((True, False), start=1):
        connection = served.connect()
        sent = json.dumps(BODY | {"max_tokens": 5000, "stream": asked})
        connection.request("POST", "/v1/completions", sent, {"Content-Type": "application/json"})
        if asked:
            connection.getresponse().readline()
        else:
            served.until(lambda: served.metric("medusa_requests_in_flight") == 1)
        connection.close()
        served.until(lambda n=cancelled: served.metric("medusa_engine_cancelled_total") == n)
        served.until(lambda: served.metric("medusa_requests_in_flight") == 0)


def test_a_client_that_leaves_while_it_waits_frees_its_place(serve: Serve) -> None:
    served = serve(ready=False, max_waiting=1)
    connection = served.connect()
    connection.request("POST", "/v1/completions", json.dumps(BODY), {"Content-Type": "application/json"})
    served.until(lambda: served.metric("medusa_requests_held") == 1)
    connection.close()
    served.until(lambda: served.metric("medusa_requests_held") == 0)
    served.control(ready=True)
    served.wait_ready()
    assert served.complete()[0] == 200


def test_a_body_has_a_limit(serve: Serve) -> None:
    served = serve(max_body_mb=1)
    status, answer, _ = served.request("POST", "/v1/completions", {"prompt": "x" * 1_100_000})
    assert status == 413
    assert "1 MB" in answer["error"]["message"]
    with socket.create_connection(("127.0.0.1", served.port)) as raw:  # no length to go by
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = b"186a0\r\n" + b" " * 100_000 + b"\r\n"
        try:
            for _ in range(12):
                raw.sendall(piece)
            raw.sendall(b"0\r\n\r\n")
        except ConnectionError:
            pass
        assert raw.recv(12) == b"HTTP/1.1 413"


@pytest.mark.parametrize("kept", [False, True], ids=["first request", "kept connection"])
@pytest.mark.parametrize("more", [b"", b"Expect: 100-continue\r\n"], ids=["plain", "continue"])
def test_a_body_that_is_announced_too_large_is_refused_before_it_comes(serve: Serve, more: bytes, kept: bool) -> None:
    """The answer once came with the first 64 KB of the body, and after a 100 that asked for it."""
    served = serve(max_body_mb=1)
    served.control(ready=True)
    served.wait_ready()
    with socket.create_connection(("127.0.0.1", served.port), timeout=20) as raw:
        if kept:
            raw.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            while not raw.recv(65536).endswith(b"}\n"):
                pass
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000001\r\n" + more + b"\r\n")
        answer = b""
        while piece := raw.recv(65536):  # it ends the connection, for the body is not read
            answer += piece
        assert answer.startswith(b"HTTP/1.1 413")
        assert b"the body is larger than 1 MB (--max-body-mb)" in answer


def test_probes_do_not_queue_behind_work(serve: Serve) -> None:
    served = serve(max_concurrency=4, max_waiting=4)
    served.control(hold=True)
    with ThreadPoolExecutor(8) as pool:
        busy = [pool.submit(served.complete) for _ in range(8)]
        served.until(lambda: served.metric("medusa_requests_in_flight") == 8)
        assert served.complete()[0] == 429
        for path in ("/livez", "/readyz", "/metrics", "/timeline", "/v1/models"):
            assert served.request("GET", path)[0] == 200
        served.control(hold=False)
        assert [future.result()[0] for future in busy] == [200] * 8


def test_idle_connections_take_no_threads(serve: Serve) -> None:
    served = serve(max_concurrency=2, max_waiting=2)
    served.wait_ready()
    worker = Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text().strip()
    with ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", served.port)))
        assert served.request("GET", "/livez")[0] == 200
        assert served.complete()[0] == 200
        assert len(list(Path(f"/proc/{worker}/task").iterdir())) < 20
    assert served.stop() == 0


def test_sigterm_finishes_streams_and_says_unready(serve: Serve) -> None:
    served = serve(token_s=0.04)
    connection, response = stream(served, max_tokens=150)
    first = response.readline()
    served.process.send_signal(signal.SIGTERM)
    served.until(lambda: served.request("GET", "/readyz")[0] == 503)
    assert served.request("GET", "/readyz")[1]["status"] == "draining"
    assert served.request("GET", "/livez")[0] == 200
    rest = response.read()
    connection.close()
    assert (first + rest).count(b'"text"') == 150
    assert rest.endswith(b"data: [DONE]\n\n")
    assert served.process.wait(60) == 0


def test_the_drain_ends(serve: Serve) -> None:
    served = serve(drain_s=0.5)
    served.control(hold=True)
    connection = served.connect()
    connection.request("POST", "/v1/completions", json.dumps(BODY), {"Content-Type": "application/json"})
    served.until(lambda: served.metric("medusa_requests_in_flight") == 1)
    assert served.stop() == 0
    connection.close()
    assert "1 request had not ended within 0.5 s and will be cut off" in served.output()


def test_sigterm_refuses_what_still_waits_for_the_start(serve: Serve) -> None:
    for options in ({"ready": False}, {"handler": "slow_load/handler.py:Handler"}):
        served = serve(**options)
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(served.complete)
            served.until(lambda served=served: served.metric("medusa_requests_held") == 1)
            assert served.stop() == 0
            status, answer, headers = held.result()
        assert status == 503
        assert "stopping" in str(answer)
        assert "retry-after" in headers


def test_sigterm_at_any_moment_ends_the_process(serve: Serve) -> None:
    for delay_s in (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.6):
        served = serve(ready=False)
        time.sleep(delay_s)
        assert served.stop() in (0, -signal.SIGTERM)


def test_the_first_answer_carries_the_stages(serve: Serve) -> None:
    served = serve()
    served.wait_ready()
    timing = served.complete()[2]["server-timing"]
    assert timing.startswith("cold_start;dur=")
    assert "desc=" not in timing  # the stages are shown only with --server-timing stages
    assert "server-timing" not in served.complete()[2]
    timeline = served.request("GET", "/timeline")[1]
    assert {"server", "app"} <= {stage["name"] for stage in timeline["stages"]}
    trace = served.request("GET", "/timeline?format=chrome")[1]["traceEvents"]
    assert {event["ph"] for event in trace} >= {"M", "X"}
    assert served.metric("medusa_time_to_first_token_seconds_count") == 2
    page = served.request("GET", "/metrics")[1].decode()
    assert 'medusa_requests_total{route="/v1/completions",status="200",model="words"} 2\n' in page
    assert "From the engine." not in page


def test_a_function_loads_in_the_background(serve: Serve) -> None:
    served = serve(handler="slow_load/handler.py:Handler")
    assert served.request("GET", "/livez")[0] == 200
    assert served.request("GET", "/readyz")[1] == {"status": "starting", "handler": "loading"}
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(served.request, "POST", "/", b"")
        served.until(lambda: served.metric("medusa_requests_held") == 1)
        (served.log.parent / "go").touch()
        assert held.result()[:2] == (200, b"loaded")
    served.wait_ready()


def test_a_client_of_events_hears_of_a_function_that_loads(serve: Serve) -> None:
    served = serve(handler="slow_load/handler.py:Handler", heartbeat_s=0.05)
    with ExitStack() as stack:
        connection = served.connect()
        stack.callback(connection.close)
        connection.request("POST", "/", b"", {"Accept": "text/event-stream"})
        response = connection.getresponse()
        assert response.status == 200
        assert [response.readline() for _ in range(4)] == [b": waiting\n", b"\n"] * 2
        (served.log.parent / "go").touch()
        events = [line for line in response.read().splitlines() if line.startswith(b"data: ")]
    assert events == [b"data: loaded", b"data: [DONE]"]


def test_nothing_heavy_is_imported_for_probes() -> None:

    code = (
        "import sys, medusa_handler.server.function_process, medusa_handler.server.wsgi_gateway\n"
        "import medusa_handler.service\n"
        "print([m for m in ('torch', 'flask', 'gunicorn', 'jinja2', 'pydantic') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path("/"))
    assert found.stdout.strip() == "[]"
