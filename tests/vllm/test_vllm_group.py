"""Groups of vLLM workers give the tokens of one instance: together, while they change, and when one of them dies."""

from __future__ import annotations

import importlib.util
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import EngineError

HERE = Path(__file__).parent
EXAMPLE = HERE.parents[1] / "examples" / "pydoc-lm"
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of vLLM's imports
]


def run(scenario: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, HERE / "run_group.py", scenario, EXAMPLE, folder]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    logs = "\n".join(f"{path.name}:\n{path.read_text()}" for path in folder.rglob("*.log"))
    assert ran.returncode == 0, ran.stderr + logs
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def assert_same(found: Any, expected: Any) -> None:
    assert found["tokens"] == expected["tokens"]
    assert found["reasons"] == expected["reasons"]
    assert len(found["logprobs"]) == len(expected["logprobs"]) > 0
    assert found["logprobs"] == pytest.approx(expected["logprobs"], abs=0.1)  # sums in another order


def test_a_group_answers_as_one_instance_and_becomes_one_while_it_does(tmp_path: Path) -> None:
    found = run("same", tmp_path)
    for phase in ("group", "during", "after"):
        assert_same(found[phase], found["expected"])
    assert found["sizes"] == [2, 1]
    assert {"form", "full", "gather", "consolidated"} <= set(found["stages"])
    assert "alone" not in found["stages"]


def test_requests_of_a_lost_worker_go_on_where_they_were(tmp_path: Path) -> None:
    found = run("killed", tmp_path)
    for victim in ("rank-0", "worker-1", "stopped"):
        assert_same(found[victim], found["expected"])
        assert found[f"{victim}-size"] == 1
        assert "alone" in found[f"{victim}-stages"]
    assert_same(found["unformed"], found["expected"])


def test_the_workers_become_instances(tmp_path: Path) -> None:
    found = run("up", tmp_path)
    for phase in ("during", "other"):
        assert_same(found[phase], found["expected"])


def test_each_worker_fetches_its_own_layers_alone(tmp_path: Path) -> None:
    found = run("first", tmp_path)
    one, two = found["1 workers"], found["2 workers"]
    assert two["token"] == one["token"]
    assert two["sent"][0] > found["size"] * 0.98  # the leader, which comes to hold all
    assert two["sent"][1] < found["size"] * 0.85  # tied embeddings are at both ends


def test_a_message_brings_data_and_nothing_that_runs() -> None:
    import numpy
    import torch
    from medusa_cluster.group.vllm.calls import deserialize, serialize
    from vllm import sampling_params
    from vllm.config import ModelConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.outputs import ModelRunnerOutput

    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    step, params = SchedulerOutput.make_empty(), SamplingParams(seed=3, stop_token_ids=[1], logit_bias={4: 1.0})
    output = ModelRunnerOutput(["a"], {"a": 0}, [[5]])
    value = ("execute_model", (step, params, spec, output), {"kept": {1, 2}})
    assert deserialize(serialize(value)) == value
    array = numpy.arange(6, dtype=numpy.int32).reshape(2, 3)
    assert (deserialize(serialize(array)) == array).all()
    for wrong in (subprocess.run, pickle.loads, Path, torch.load, importlib.import_module, ModelConfig):
        with pytest.raises(EngineError, match="expected only data"):
            deserialize(pickle.dumps(wrong))
    # Through a module that may be named, by what it imported.
    assert isinstance(sampling_params.ModelConfig, type)
    for name in ("ModelConfig", "json_mod.JSONDecoder"):
        with pytest.raises(EngineError, match="expected only data"):
            deserialize(b"\x80\x04\x8c\x14vllm.sampling_params\x8c" + bytes((len(name),)) + name.encode() + b"\x93.")
    for wrong in (b"", b"\x80\x05.", b"junk"):
        with pytest.raises(EngineError):
            deserialize(wrong)


def test_hidden_states_travel_as_they_are() -> None:
    import torch
    from medusa_cluster.group.vllm.pipe import tensors_message, tensors_of

    tensors = {"hidden_states": torch.randn(3, 5).bfloat16(), "residual": torch.randn(3, 5)}
    message = tensors_message(7, 1, tensors)
    found = tensors_of(message)
    assert list(found) == list(tensors)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    for body in (b"", b'[["a", "int8", [1]]]\n0', b'[["a", "float32", [9]]]\n'):
        with pytest.raises(EngineError):
            tensors_of(message._replace(body=bytearray(body)))


def test_a_result_that_cannot_be_read_ends_the_call_that_waits_for_it() -> None:
    import socket

    from medusa_cluster.group.forming import Worker
    from medusa_cluster.group.plan import GroupPlan
    from medusa_cluster.group.vllm.executor import BrokenGroupError, Calls
    from medusa_cluster.group.wire.channel import TcpChannel
    from medusa_cluster.group.wire.message import Kind, Message
    from medusa_runtime.models.layer_range import LayerRange
    from medusa_runtime.timeline import Timeline

    plan, timeline = GroupPlan("g", "token", 0, 2, "127.0.0.1:1"), Timeline.create("engine")
    ours, theirs = (TcpChannel(one, urgent=False) for one in socket.socketpair())
    worker = Worker(1, LayerRange(0, 1, 1), "127.0.0.1:1", 1, ours)
    calls = Calls([worker], plan, timeline, all_loaded=lambda: True)
    (waiting,) = calls.call("execute_model", (), {}, range(1, 2))
    while (asked := theirs.receive()) is not None and asked.kind is not Kind.CALL:
        pass
    assert asked is not None
    theirs.send(Message(Kind.RESULT, plan.number, asked.step, 1, body=b"no pickle"))
    with pytest.raises(BrokenGroupError, match="could not be read"):
        waiting.result(timeout=60)
    theirs.close()
    calls.connections.release(1)
    timeline.close()
