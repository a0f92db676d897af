"""Idle engine processes: taken once, refilled, and given up when they cannot live."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.config import Settings
from medusa_runtime.errors import DeviceError, NodeError, NodeRefusedError
from medusa_runtime.node.engines import handover, warm_engine
from medusa_runtime.node.engines.handover import settings_from_body, settings_to_body
from medusa_runtime.node.engines.pool import EnginePool
from medusa_runtime.node.event_loop import EventLoop
from medusa_runtime.node.messages import LARGEST_BYTES, Message, channel_pair
from medusa_runtime.process import ReportPipe
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline
from process_tree import alive
from vllm_installed import vllm_is_installed

pytestmark = [pytest.mark.timeout(400), pytest.mark.forked]

Start = Callable[..., Any]
Put = Callable[..., str]

# What an engine process does not read, or by which it only computes in another way.
HARMLESS = {
    "model", "engine", "state", "served_model_name", "tool_call_parser", "reasoning_parser", "lora_modules",
    "max_loras", "max_lora_rank", "max_lora_mb", "allow_lora", "device", "dtype", "max_model_len",
    "max_concurrency", "max_waiting", "max_batched_tokens", "kv_cache_mb", "prefix_cache_mb", "compile", "kernels",
    "layers", "threads", "connections", "load_priority", "torch_import", "node_user", "engine_start", "host_weights",
    "graphs", "memory_limit_mb", "heartbeat_s", "hold_s", "drain_s", "timeout_s", "read_timeout_s",
    "write_timeout_s", "max_body_mb", "server_timing", "body_memory_mb", "cors_origins", "access_log", "traces",
    "log_level", "log_format",
}  # fmt: skip


@pytest.fixture
def given() -> Iterator[tuple[list[int], socket.socket]]:
    """What a function hands over, and its end of the lease."""
    listener, timeline, reports, (mine, theirs) = (
        socket.socket(socket.AF_UNIX),
        Timeline.create("t"),
        ReportPipe(),
        channel_pair(),
    )
    yield [listener.fileno(), timeline.fd, reports.write_fd, theirs.fileno()], mine
    for one in (listener, mine, theirs):
        one.close()
    timeline.close()
    reports.close()


def test_settings_travel_without_secrets() -> None:
    settings = Settings(model="m", token="secret", max_model_len=7, handler="h:f", dtype="float32")
    body = settings_to_body(settings)
    assert "secret" not in str(body)
    assert settings_from_body(body) == Settings(model="m", max_model_len=7, dtype="float32")
    for bad in ({"model": "m", "unheard_of": 1}, ["m"], {"token": "x"}):
        with pytest.raises(NodeError, match="expected the same version"):
            settings_from_body(bad)


def test_no_engine_of_a_kind(start_node: Start, put_model: Put, given: Any) -> None:
    client = start_node().client()
    client.region(put_model("m")).close()
    with pytest.raises(NodeError, match=r"keeps no torch engines; start it with --prewarm torch=1"):
        client.engine("torch", {}, given[0])


def test_a_function_that_makes_no_sense_ends_one_process_alone(start_node: Start, put_model: Put, given: Any) -> None:
    node = start_node("--prewarm", "torch=1")
    node.wait_warm()
    descriptors, _ = given
    client = node.client()
    client.region(put_model("m")).close()
    with pytest.raises(NodeError, match="expected 4 descriptors, found 1"):
        client.engine("torch", {}, descriptors[:1])
    pid = client.engine("torch", {"unheard_of": 1}, descriptors)
    node.until(lambda: not alive(pid))
    with pytest.raises(NodeRefusedError, match="one engine process"):
        client.engine("torch", {}, descriptors)
    node.wait_warm()
    assert node.status()["engines"]["torch"]["taken"] == 1


def test_what_ends_while_idle_is_replaced(start_node: Start) -> None:
    node = start_node("--prewarm", "torch=1")
    node.wait_warm()
    (first,) = node.status()["engines"]["torch"]["pids"]
    os.kill(first, signal.SIGKILL)
    node.until(lambda: node.status()["engines"]["torch"]["pids"] not in ([], [first]))
    zygotes = [pid for pid, name in node.children().items() if name == "torch-zygote"]
    assert len(zygotes) == 1
    os.kill(zygotes[0], signal.SIGKILL)
    node.until(lambda: zygotes[0] not in node.children())
    node.wait_warm()
    assert node.stop() == 0


@pytest.mark.skipif(vllm_is_installed(), reason="vLLM is installed")
def test_an_engine_that_cannot_be_imported_is_given_up(start_node: Start) -> None:
    node = start_node("--prewarm", "vllm=1")
    node.until(lambda: node.status()["engines"]["vllm"]["failure"])
    assert "the vllm engine cannot be imported" in node.status()["engines"]["vllm"]["failure"]
    node.until(lambda: not node.children())


def test_settings_too_long_to_pass_on_cost_no_engine(start_node: Start, put_model: Put, given: Any) -> None:
    node = start_node("--prewarm", "torch=1")
    node.wait_warm()
    idle = node.status()["engines"]["torch"]["pids"]
    client = node.client()
    client.region(put_model("m")).close()
    around = len(json.dumps({"kind": "torch", "settings": {"model": ""}, "type": "engine"}, separators=(",", ":")))
    with pytest.raises(NodeError, match="too long"):
        client.engine("torch", {"model": "m" * (LARGEST_BYTES - around)}, given[0])
    assert node.status()["engines"]["torch"]["pids"] == idle
    assert client.engine("torch", {"unheard_of": 1}, given[0]) == idle[0]


# Writes which GPUs a process sees when it chooses its device.
WATCH = """
import os
from medusa_runtime.device import choice

def choose(asked, environ):
    with open(os.environ["SEEN"], "a") as file:
        print(environ.get("CUDA_VISIBLE_DEVICES"), file=file)
    return "cpu"

choice.choose = choose
"""


def test_an_engine_computes_on_the_gpu_of_the_function_that_takes_it(
    start_node: Start, put_model: Put, given: Any, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    seen = tmp_path / "seen"
    node = start_node("--prewarm", "torch=1", wrapper=("env", f"PYTHONPATH={tmp_path}", f"SEEN={seen}"))
    node.wait_warm()
    client = node.client()
    client.region(put_model("m")).close()
    with pytest.raises(NodeError, match="gpus: expected the text of CUDA_VISIBLE_DEVICES, found '7'"):
        client.engine("torch", {}, given[0], 7)  # type: ignore[arg-type]
    client.engine("torch", {"state": "none"}, given[0], "GPU-7")
    node.until(lambda: seen.read_text().split() == ["None", "GPU-7"])


def test_an_engine_with_a_context_on_a_gpu_is_not_taken_for_another_gpu() -> None:
    pool = EnginePool(
        {"torch": 1}, gpu_context=True, timeline=Timeline.create("t"), reports=ReportPipe(), loop=EventLoop()
    )
    with pytest.raises(NodeRefusedError, match="perhaps not on 'GPU-7'"):
        pool.take("torch", {}, [], gpus="GPU-7")
    with pytest.raises(NodeError, match="no idle torch engine process is warm"):
        pool.take("torch", {}, [])


def test_of_each_setting_somebody_has_decided_whether_other_users_may_set_it() -> None:
    assert not HARMLESS & (handover.PRIVATE | handover.WITH_AGENTS_RIGHTS)
    assert {field.name for field in fields(Settings)} == HARMLESS | handover.PRIVATE | handover.WITH_AGENTS_RIGHTS


def test_a_gpu_that_cannot_be_used_is_named_by_a_warm_process_too(
    given: tuple[list[int], socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its context is made for the GPU that it is given, while it prepares."""
    made: list[str | None] = []

    class Context:
        def __init__(self, timeline: Timeline) -> None:
            made.append(os.environ.get("CUDA_VISIBLE_DEVICES"))

        def wait(self) -> None:
            raise DeviceError("expected a GPU of compute capability 9.0, for which this image was built, found a T4")

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(warm_engine, "choose", lambda asked, environ: "cuda")
    monkeypatch.setattr(warm_engine, "DeviceContext", Context)
    monkeypatch.setattr(warm_engine, "_end_with", lambda lease: lease.close())
    monkeypatch.setattr(warm_engine, "limit_log", lambda: None)  # pytest's handlers would keep it for all later tests
    monkeypatch.setattr(warm_engine, "run_engine", lambda make, listener, **_: (listener.close(), make()))
    listener, timeline, reports, lease = map(os.dup, given[0])
    region = Region.create()
    descriptors = [os.dup(region.fd), os.memfd_create("demand"), listener, timeline, reports, lease]
    body = {"settings": settings_to_body(Settings(engine="torch")), "gpus": "GPU-7"}
    with pytest.raises(DeviceError, match="found a T4"):
        warm_engine._serve(lambda *_: pytest.fail("it was opened"), "torch", Message("take", body, descriptors))
    assert made == ["GPU-7"]
