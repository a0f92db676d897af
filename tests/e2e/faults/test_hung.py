"""Processes that are stopped, or look as if they were, in the middle of a start and of the work."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from process_tree import Unloaded, alive, stopped
from slow_origin import SlowOrigin, serving_origin
from waiting import until

Start = Callable[..., Any]
_NOTICED_S = 3.0


@pytest.fixture
def slow_origin(example: Path) -> Iterator[SlowOrigin]:
    with serving_origin(example, bytes_per_s=1e6) as server:
        yield server


def killed_within(serving: Any, name: str) -> float:
    """Stop a process; the seconds, without load, after which somebody has killed it."""
    pid = serving.child(name)
    watcher = serving.child("function") if name == "worker" else serving.process.pid
    if name == "worker":  # it is continued the first time
        os.kill(pid, signal.SIGSTOP)
        until(lambda: stopped(pid))
        until(lambda: not stopped(pid))
    os.kill(pid, signal.SIGSTOP)
    until(lambda: not alive(pid) or stopped(pid))
    clock = Unloaded(watcher)
    until(lambda: not alive(pid) or not stopped(pid))  # SIGKILL makes it run again, at the latest when it has a CPU
    passed_s = clock.passed_s()
    until(lambda: not alive(pid))
    return passed_s


def other(serving: Any, name: str, than: int) -> int:
    """The process that has replaced another one."""
    deadline = time.monotonic() + 60
    while (pid := serving.child(name)) == than:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return int(pid)


@pytest.mark.forked
@pytest.mark.parametrize("name", ["engine", "zygote"])
def test_a_stopped_process_of_a_ready_instance_is_named_and_replaced(start: Start, example: Path, name: str) -> None:
    serving = start("--model", example)
    serving.wait_ready()
    serving.complete()
    pid = serving.child(name)
    named: list[Any] = []
    ended = threading.Event()

    def probe() -> None:
        while not ended.is_set():
            status, answer, _ = serving.request("GET", "/readyz")
            if answer.get("status") == "hung":
                named.append((status, answer["process"]))
            assert serving.request("GET", "/livez")[0] == 200
            time.sleep(0.05)

    prober = threading.Thread(target=probe)
    prober.start()
    took_s = killed_within(serving, name)
    other(serving, name, pid)
    ended.set()
    prober.join()
    assert took_s <= _NOTICED_S
    assert set(named) == {(503, name)}
    serving.wait_ready()
    assert serving.complete()["choices"][0]["text"]
    metrics = serving.request("GET", "/metrics")[1].decode()
    assert re.search(rf'(?m)^medusa_process_restarts_total{{process="{name}"[^}}]*}} 1$', metrics)
    assert f"the {name} process ({pid}) hangs: it has been stopped" in serving.output()
    assert serving.stop() == 0


@pytest.mark.forked
def test_a_stopped_worker_is_named_and_continued(start: Start, example: Path) -> None:
    serving = start("--model", example)
    serving.wait_ready()
    worker = serving.child("worker")
    os.kill(worker, signal.SIGSTOP)
    until(lambda: stopped(worker))
    clock = Unloaded(serving.child("function"))
    named = set()
    while stopped(worker):
        status, answer, _ = serving.request("GET", "/readyz")
        named.add((status, answer.get("process")))
    assert clock.passed_s() <= _NOTICED_S
    assert (503, "worker") in named
    assert serving.complete()["choices"][0]["text"]
    assert serving.child("worker") == worker
    assert f"the worker process ({worker}) hangs: it has been stopped" in serving.output()
    assert serving.stop() == 0


@pytest.mark.forked
def test_a_request_that_had_begun_ends_with_one_clear_error(start: Start, example: Path) -> None:
    serving = start("--model", example)
    serving.wait_ready()
    answers: list[Any] = []
    body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True, "n": 64}  # eight at a time
    asking = threading.Thread(target=lambda: answers.append(serving.request("POST", "/v1/completions", body)))
    asking.start()
    until(lambda: (serving.metric("medusa_engine_generated_tokens_total") or 0) >= 10)
    assert killed_within(serving, "engine") <= _NOTICED_S
    asking.join()
    assert [(status, answer["error"]["code"]) for status, answer, _ in answers] == [(503, "Engine.Failed")]
    assert all("try again" in answer["error"]["message"] for _, answer, _ in answers)
    assert serving.complete()["choices"][0]["text"]
    assert serving.stop() == 0


@pytest.mark.forked
def test_a_stopped_prefetcher_is_replaced_and_nothing_is_fetched_twice(start: Start, slow_origin: SlowOrigin) -> None:
    serving = start("--model", slow_origin.url)
    while serving.request("GET", "/readyz")[1].get("fetched_bytes", 0) == 0:
        time.sleep(0.02)
    assert killed_within(serving, "prefetcher") <= _NOTICED_S
    slow_origin.bytes_per_s = 1e9
    assert serving.complete()["choices"][0]["text"]
    assert serving.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("name", ["prefetcher", "zygote", "engine", "worker"])
@pytest.mark.parametrize("delay_s", [0.0, 0.3, 0.8])
@pytest.mark.slow
def test_each_process_in_each_phase_of_the_start(
    start: Start, slow_origin: SlowOrigin, name: str, number: signal.Signals, delay_s: float
) -> None:
    serving = start("--model", slow_origin.url)
    pid = serving.child(name)
    time.sleep(delay_s)
    if alive(pid):
        if number == signal.SIGSTOP:
            assert killed_within(serving, name) <= _NOTICED_S
        else:
            os.kill(pid, signal.SIGKILL)
    slow_origin.bytes_per_s = 1e9
    serving.wait_ready()
    assert serving.complete()["choices"][0]["text"]
    assert serving.stop() == 0


@pytest.mark.forked
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_without_the_function_process_the_instance_ends(start: Start, example: Path, number: signal.Signals) -> None:
    """Nobody accepts connections any more, so the platform must see the end, and start another."""
    serving = start("--model", example)
    serving.wait_ready()
    tree = serving.children()
    if number == signal.SIGSTOP:
        assert killed_within(serving, "function") <= _NOTICED_S
    else:
        os.kill(serving.child("function"), number)
    assert serving.wait_gone(tree) == 1
    assert "the function process ended by itself (killed by SIGKILL)" in serving.output()


@pytest.mark.forked
def test_a_stopped_supervisor_fails_the_liveness_probe_until_it_goes_on(start: Start, example: Path) -> None:
    serving = start("--model", example)
    serving.wait_ready()
    os.kill(serving.process.pid, signal.SIGSTOP)
    until(lambda: stopped(serving.process.pid))
    clock = Unloaded(serving.child("function"))
    while serving.request("GET", "/livez")[0] == 200:
        time.sleep(0.05)
    assert clock.passed_s() <= _NOTICED_S
    status, answer, _ = serving.request("GET", "/livez")
    assert (status, answer) == (503, {"status": "hung", "process": "supervisor"})
    assert serving.complete()["choices"][0]["text"]
    os.kill(serving.process.pid, signal.SIGCONT)
    while serving.request("GET", "/livez")[0] != 200:
        time.sleep(0.05)
    assert serving.stop() == 0


HOLDS_THE_LOCK = """
import ctypes, time

def handle(request):
    seconds = request.json["seconds"]
    if request.json["how"] == "asleep":
        ctypes.PyDLL(None).usleep(int(seconds * 1e6))  # a PyDLL keeps the interpreter's lock
    else:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sum(range(100_000))
    return "done"
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["asleep", "busy"])
def test_code_that_holds_the_interpreters_lock_is_left_alone(start: Start, tmp_path: Path, how: str) -> None:
    (tmp_path / "handler.py").write_text(HOLDS_THE_LOCK)
    serving = start("--handler", f"{tmp_path}/handler.py:handle")
    serving.wait_ready()
    worker = serving.child("worker")
    answers: list[Any] = []
    asking = threading.Thread(
        target=lambda: answers.append(serving.request("POST", "/", {"seconds": 8, "how": how})[:2])
    )
    asking.start()
    while asking.is_alive():
        assert serving.request("GET", "/readyz")[0] == 200
        time.sleep(0.1)
    assert answers == [(200, b"done")]
    assert serving.child("worker") == worker
    assert "hangs" not in serving.output()
    assert serving.stop() == 0


@pytest.mark.slow
def test_a_pause_of_the_whole_instance_is_no_hang(start: Start, example: Path) -> None:
    """As when a laptop sleeps or a container is paused: everything stops at once, and goes on at once."""
    serving = start("--model", example)
    serving.wait_ready()
    tree = serving.children()
    everybody = [serving.process.pid, *tree]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    until(lambda: all(map(stopped, everybody)))  # each stops when it next runs
    time.sleep(6)
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
    assert serving.complete()["choices"][0]["text"]
    assert serving.children() == tree
    assert "hangs" not in serving.output()
    assert serving.stop() == 0
