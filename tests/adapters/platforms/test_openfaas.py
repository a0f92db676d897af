"""The contract of of-watchdog: health, limits, timeouts, call ids, the lock file, metrics, and the end."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from medusa_adapters.platforms import openfaas
from medusa_runtime.errors import ConfigError
from process_tree import descendants

from benchmarks.ports import free_port

Launch = Callable[..., Any]
LOCK = Path("/tmp/.lock")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("1m", 60), ("500ms", 0.5), ("1h2m3.5s", 3723.5), ("45", 45), ("100us", 1e-4), ("+1.5h", 5400)],
)
def test_durations_are_gos(text: str, seconds: float) -> None:
    assert openfaas.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "1x", "1.5", "-3s", "5 s", "1m30", "٣s", "5s\n", "9999999999h"])
def test_a_duration_that_is_none_names_its_variable(text: str) -> None:
    with pytest.raises(ValueError, match="such as 30s"):
        openfaas.parse_duration(text)
    if text:
        with pytest.raises(ConfigError, match="exec_timeout"):
            openfaas.variables({"exec_timeout": text})


@pytest.mark.parametrize("text", ["-1", "many", "1.5", "9" * 400, "9" * 5000])
def test_a_number_of_calls_that_is_none_names_its_variable(text: str) -> None:
    with pytest.raises(ConfigError, match=r"max_inflight=.* expected a whole number, 0 or more"):
        openfaas.variables({"max_inflight": text})


def test_the_watchdogs_variables_are_translated() -> None:
    given = {"exec_timeout": "1m", "read_timeout": "5s", "write_timeout": "2m", "max_inflight": "3"}
    assert openfaas.variables(given | {"healthcheck_interval": "4s"}) == {
        "MEDUSA_TIMEOUT": "60",
        "MEDUSA_READ_TIMEOUT": "5",
        "MEDUSA_WRITE_TIMEOUT": "120",
        "MEDUSA_MAX_CONCURRENCY": "3",
        "MEDUSA_MAX_WAITING": "0",
        "MEDUSA_DRAIN": "64",
    }


@pytest.fixture(scope="module")
def function(launch_module: Launch) -> Any:
    return launch_module(
        handler="openfaas/handler.py", OPENFAAS_NAME="f", exec_timeout="20s", suppress_lock="true", metrics_port="0"
    )


def test_a_call_has_its_id_and_duration(function: Any) -> None:
    answer = function.request("POST", "/a?q=1", b"hi", X_Call_Id="call-1")
    assert (answer.status, answer.json["body"]) == (201, "hi")
    assert (answer.headers["x-call-id"], answer.headers["x-request-id"]) == ("call-1", "call-1")
    assert float(answer.headers["x-duration-seconds"]) > 0
    assert function.request("GET", "/_/health").status == 200
    assert function.request("GET", "/_/ready").status == 200


def test_max_inflight_refuses_at_once_and_leaves_health_alone(launch: Launch) -> None:
    port = free_port()
    busy = launch(
        handler="sleeping/handler.py", max_inflight="2", metrics_port=str(port), suppress_lock="1", exec_timeout="30s"
    )
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(busy.request, "POST", "/", b"") for _ in range(2)]
        busy.until(lambda: busy.metric("medusa_requests_in_flight") == 2)
        answer = busy.request("POST", "/", b"")
        assert answer.status == 429
        assert "retry-after" in answer.headers
        assert busy.request("GET", "/_/health").status == 200
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            text = page.read().decode()
        assert "medusa_requests_in_flight 2" in text
        assert 'http_requests_total{code="429",method="post"} 1' in text
        assert 'http_request_duration_seconds_count{code="429",method="post"} 1' in text
        assert text.count("# TYPE http_request_duration_seconds histogram") == 1
        (busy.folder / "go").touch()
        assert [future.result().status for future in running] == [200, 200]
    assert busy.request("POST", "/", b"").status == 200


@pytest.mark.parametrize("target", ["handle", "wait", "count"])
def test_time_runs_out(launch: Launch, target: str) -> None:
    slow = launch(handler=f"sleeping/handler.py:{target}", exec_timeout="30s", suppress_lock="true", metrics_port="0")
    answer = slow.request("POST", "/", b"", X_Timeout="400ms")
    if target == "count":  # it had begun: the stream tells
        assert answer.body.endswith(b'data: {"error":"the request took longer than 0.4 s"}\n\ndata: [DONE]\n\n')
    else:
        assert answer.status == 504
        assert "0.4 s" in answer.json["error"]
    assert slow.request("POST", "/", b"quick", X_Timeout="nonsense").status == 200


def test_exec_timeout_bounds_x_timeout(launch: Launch) -> None:
    slow = launch(handler="sleeping/handler.py", exec_timeout="300ms", suppress_lock="true", metrics_port="0")
    answer = slow.request("POST", "/", b"", X_Timeout="1h")
    assert answer.status == 504
    assert "0.3 s" in answer.json["error"]
    assert float(answer.headers["x-duration-seconds"]) >= 0.3


def test_a_slow_request_is_ended(launch: Launch) -> None:
    patient = launch(handler="openfaas/handler.py", read_timeout="500ms", suppress_lock="true", metrics_port="0")
    answer = patient.raw(b"POST / HTTP/1.1\r\nHost: x\r\n")  # a head that never ends
    assert answer.startswith(b"HTTP/1.1 408 ")
    answer = patient.raw(b"POST /?q=1 HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\nfour")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"not there within 0.5 s" in answer
    assert patient.request("POST", "/?q=1", b"next").status == 201


def test_a_client_that_reads_nothing_is_ended(launch: Launch) -> None:
    stalled = launch(
        "--write-timeout-s", "0.5", handler="sleeping/handler.py:flood", OPENFAAS_NAME="f", suppress_lock="1",
        metrics_port="0",
    )  # fmt: skip
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", stalled.port))
        client.sendall(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        stalled.until(lambda: (stalled.folder / "closed").exists())
    stalled.until(lambda: stalled.metric("medusa_requests_in_flight") == 0)
    assert "Traceback" not in stalled.output()


def test_sigterm_in_the_watchdogs_order(launch: Launch) -> None:
    LOCK.unlink(missing_ok=True)
    ending = launch(handler="openfaas/handler.py", healthcheck_interval="5s", metrics_port="0")
    assert LOCK.exists()
    ending.terminate()
    ending.until(lambda: ending.request("GET", "/_/health").status == 503)
    assert not LOCK.exists()
    assert ending.request("GET", "/_/ready").status == 503
    assert ending.request("POST", "/?q=1", b"late").status == 201  # the gateway has not noticed yet
    assert ending.process.wait(60) == 0


def test_the_functions_own_ready_path(launch: Launch) -> None:
    own = launch(
        handler="sleeping/handler.py:check", ready_path="/am-i", OPENFAAS_NAME="f", suppress_lock="1", metrics_port="0"
    )
    assert own.request("GET", "/_/ready").status == 503
    (own.folder / "go").touch()
    assert own.request("GET", "/_/ready").status == 200


def test_connections_to_the_metrics_port_hold_few_threads(launch: Launch) -> None:
    port = free_port()
    function = launch(handler="openfaas/handler.py", OPENFAAS_NAME="f", metrics_port=str(port), suppress_lock="1")
    function.request("POST", "/", b"x")  # the port is there with the first call
    with contextlib.ExitStack() as stack:
        for _ in range(100):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)).sendall(b"GET ")
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read()
        assert b"http_requests_total" in page
        threads = [len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in descendants(function.process.pid)]
        assert max(threads) < 60


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_what_others_put_in_place_of_the_lock_is_left_alone(tmp_path: Path, kind: str) -> None:
    lock, other = tmp_path / ".lock", tmp_path / "other"
    other.write_text("mine")
    if kind == "link":
        lock.symlink_to(other)
    else:
        os.mkfifo(lock)
    openfaas._touch(lock)
    assert other.read_text() == "mine"


def test_a_metrics_port_that_is_taken_costs_only_the_metrics(launch: Launch) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        going = launch(handler="openfaas/handler.py", OPENFAAS_NAME="f", metrics_port=str(port), suppress_lock="1")
        assert going.request("POST", "/?q=1", b"").status == 201
        going.until(lambda: f"no metrics on port {port}" in going.output())


def test_health_answers_while_the_function_loads(launch: Launch) -> None:
    loading = launch(
        handler="slow_load/handler.py:Handler", OPENFAAS_NAME="f", suppress_lock="1", metrics_port="0", wait=False
    )
    assert loading.request("GET", "/_/health").status == 200
    assert loading.request("GET", "/_/ready").status == 503
    answers: list[Any] = []
    held = threading.Thread(target=lambda: answers.append(loading.request("POST", "/", b"")))
    held.start()
    loading.until(lambda: loading.metric("medusa_requests_held") == 1)
    time.sleep(0.1)
    assert not answers
    (loading.folder / "go").touch()
    held.join()
    assert answers[0].status == 200
