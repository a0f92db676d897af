"""Groups on GPUs: what differs from CPUs. The tokens are also compared in the tests of groups and of live scaling."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixtures import SETTINGS, fill_region
from group_fixtures import Group, host_gpu
from host_gpu import Arrived, Bundled, HostGpu, HostKernels, HostLink, Recorder
from medusa_cluster.group.gathering import BlockSource, Gathering
from medusa_cluster.group.plan import GroupPlan
from medusa_cluster.group.vllm import engine as vllm_engine
from medusa_cluster.group.wire.channel import Greeting, Listener, connect
from medusa_cluster.group.wire.message import Kind, Message
from medusa_runtime.device.choice import obstacle
from medusa_runtime.engine.torch import engine as torch_engine
from medusa_runtime.engine.torch.kv_cache import SPARE_BLOCKS, KvCache, KvShape
from medusa_runtime.engine.torch.kv_size import geometry
from medusa_runtime.engine.torch.transfers import BlockCopies
from medusa_runtime.errors import ConfigError, DeviceError
from medusa_runtime.models.layer_range import LayerRange
from medusa_runtime.state.bundle.manifest import Artifact, Manifest
from medusa_runtime.state.key import Facts, Subject, choose_artifact
from medusa_runtime.state.kinds import KINDS, file_name
from medusa_runtime.state.kv_plan import plan_to_record
from medusa_runtime.timeline import Timeline
from torch import Tensor
from waiting import until

PROMPT = "Tokens flow from storage to memory, and from memory to layers. "
FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.25 GiB is "
    "free. Process 7 has 77.85 GiB memory in use."
)
NAMED = (
    "the GPU's memory has no room for a step beside the weights and the KV cache (Tried to allocate 2.00 GiB. GPU 0 "
    "has a total capacity of 79.10 GiB of which 1.25"
)


def addresses(engine: Any) -> dict[str, int]:
    """The place of each parameter in the device's memory for weights."""
    start = engine._gpu.link.ranges["weights"].data_ptr()
    return {name: tensor.data_ptr() - start for name, tensor in engine._model.named_parameters()}


def test_the_other_layers_come_to_where_an_instance_has_them(
    group: Callable[..., Group], serve_region: Callable[..., Any], checkpoint: Path
) -> None:
    made = group("0:2", "2:4", gpu=host_gpu).start()
    made.wait_full()
    region = fill_region(checkpoint)
    alone = serve_region(region, host_gpu())
    alone.engine.wait_ready()
    for worker in made.workers:
        engine: Any = worker.engine
        assert addresses(engine) == addresses(alone.engine)
        assert [link.in_background for link in engine._gpu.links] == [True]
        assert list(engine._gpu.links[0].ranges) == [], "the weights have one block of memory"
    region.close()


def test_a_worker_without_room_for_the_others_has_only_its_own(group: Callable[..., Group], serve: Any) -> None:
    expected = serve().ask(PROMPT, max_tokens=9).tokens
    made = group("0:1", "1:4", gpu=host_gpu, full=False).start()
    assert made.leader.ask(PROMPT, max_tokens=9).tokens == expected
    leader, worker = (made.workers[rank].engine for rank in range(2))
    weights = [engine._gpu.link.ranges["weights"].nbytes for engine in (leader, worker)]  # type: ignore[attr-defined]
    assert weights[1] < weights[0]
    assert worker._cache.shape.layers == 3  # type: ignore[attr-defined]
    assert sorted(worker._gpu.link.ranges) == ["KV cache", "weights"], "it has no graphs"  # type: ignore[attr-defined]
    assert made.formed


def test_an_embedding_that_is_also_the_head_is_in_both_parts(
    group: Callable[..., Group], serve: Any, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    folder = tmp_path / "tied"
    folder.mkdir()
    make_checkpoint(folder, tie_word_embeddings=True)
    expected = serve(folder).ask(PROMPT, max_tokens=20).tokens
    made = group("0:2", "2:4", folder=folder, gpu=host_gpu).start()
    made.wait_full()
    answer = made.leader.ask(PROMPT, max_tokens=20)
    answer.next()
    made.leader.engine.consolidate("down")  # type: ignore[attr-defined]
    assert answer.tokens == expected
    assert made.leader.ask(PROMPT, max_tokens=20).tokens == expected
    assert "alone" not in [stage.name for stage in made.leader.timeline.stages()]


def test_graphs_are_captured_once_it_is_alone_and_used_then(group: Callable[..., Group], serve: Any) -> None:
    expected = serve().ask(PROMPT, max_tokens=40).tokens
    made = group("0:2", "2:4", gpu=host_gpu).start()
    made.wait_full()
    leader: Any = made.leader.engine
    recorder = leader._gpu.recorder
    answer = made.leader.ask(PROMPT, max_tokens=40)
    for _ in range(10):
        answer.next()
    assert not recorder.captured, "the other worker waits meanwhile"
    leader.consolidate("down")
    assert answer.tokens == expected
    until(lambda: len(recorder.captured) == 4)
    assert made.leader.ask(PROMPT, max_tokens=40).tokens == expected
    assert leader.runner.graphs.replays > 0
    assert "alone" not in [stage.name for stage in made.leader.timeline.stages()]


@pytest.mark.parametrize("bundled", [None, b"1 2 4 8"])
def test_all_workers_prepare_the_kernels_of_decode_steps_at_once(
    group: Callable[..., Group], serve: Any, monkeypatch: pytest.MonkeyPatch, bundled: bytes | None
) -> None:
    """Else the second token of a group waits for the first worker's kernels, and then for those of the next."""
    expected = serve().ask(PROMPT, max_tokens=9).tokens
    if bundled is not None:
        monkeypatch.setattr(torch_engine, "bundled_graphs", lambda region, settings: Bundled(bundled))
    kernels = HostKernels(monkeypatch)
    made = group("0:2", "2:4", gpu=host_gpu).start()
    answer = made.leader.ask(PROMPT, max_tokens=9)
    answer.next()
    assert made.formed
    assert answer.incoming.empty()
    kernels.compiled.set()
    assert answer.tokens == expected
    assert kernels.waited == {"decode-kernels"}, "a step launched them before"
    for worker in made.workers:
        assert "decode_kernels" in [stage.name for stage in worker.timeline.stages()]


def test_the_bundles_graphs_are_restored_once_it_is_alone(
    group: Callable[..., Group], serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_engine, "bundled_graphs", lambda region, settings: Bundled(b"1 2 4 8"))
    expected = serve().ask(PROMPT, max_tokens=40).tokens
    made = group("0:2", "2:4", gpu=host_gpu).start()
    made.wait_full()
    leader: Any = made.leader.engine
    answer = made.leader.ask(PROMPT, max_tokens=40)
    for _ in range(10):
        answer.next()
    assert not leader._gpu.built
    assert not leader._gpu.restores
    leader.consolidate("down")
    assert answer.tokens == expected
    assert leader._gpu.restores == [(1, 2, 4, 8)]
    assert leader.runner.graphs.replays > 0
    until(lambda: len(leader._gpu.recorder.captured) == 1)  # of one sequence, which does not fit


def test_a_bundle_for_an_engine_is_one_for_its_groups(checkpoint: Path) -> None:
    region = fill_region(checkpoint)
    subjects = [
        Subject(region.wait_index(), {}, replace(SETTINGS, engine=name)) for name in ("torch", "group", "cluster")
    ]
    torchs, groups, others = (Facts(subject) for subject in subjects)
    assert torchs["engine"] == groups["engine"] != others["engine"]
    for name in ("kv-plan", "cuda-graphs"):
        kind = KINDS[name]
        manifest = Manifest((Artifact(kind.name, torchs.key(kind.facts), "0" * 64, 1),), ())
        assert choose_artifact(manifest, kind, [groups]) is manifest.artifacts[0]
        assert choose_artifact(manifest, kind, [others]) is None
    region.close()


def test_a_recorded_plan_of_the_kv_cache_is_for_workers_with_room_for_all_layers(
    group: Callable[..., Group], checkpoint: Path, caplog: Any
) -> None:
    shape = geometry(KvShape(4, 2, 16, torch.float32), 512)
    recorded = plan_to_record(shape, SETTINGS, activation_bytes=1 << 20)
    made = group("0:2", "2:4", gpu=host_gpu, full=False, kv_cache_mb=None)
    for rank in range(2):
        region = fill_region(checkpoint)
        region.attach_file(file_name("kv-plan"), recorded.to_bytes())
        made.stack.callback(region.close)
        made.add(rank, region=region)
    stages = [stage for worker in made.workers for stage in worker.timeline.stages() if stage.name == "kv_plan"]
    assert [stage.detail["source"] for stage in stages] == ["recorded", "computed"]
    assert "the recorded KV plan is for another" not in caplog.text


@pytest.mark.parametrize("after", [0, 7])
def test_a_worker_that_ends_costs_no_token(after: int, group: Callable[..., Group], serve: Any) -> None:
    expected = serve().ask(PROMPT, max_tokens=24).tokens
    made = group("0:1", "1:2", "2:4", gpu=host_gpu).start()
    answer = made.leader.ask(PROMPT, max_tokens=24)
    for _ in range(after):
        answer.next()
    made.workers[1].stop.set()
    assert answer.tokens == expected
    assert made.leader.engine.stats()["workers"] == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_gpu_is_named_and_costs_no_token(
    rank: int, group: Callable[..., Group], serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    expected = serve().ask(PROMPT, max_tokens=24).tokens
    made = group("0:2", "2:4", gpu=host_gpu).start()
    answer = made.leader.ask(PROMPT, max_tokens=24)
    answer.next()

    def is_full(*_: Any) -> Any:
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(made.workers[rank].engine.runner, "forward", is_full)  # an instance's steps do not use it
    assert answer.tokens == expected
    assert (f"worker {rank} is lost: {NAMED}" if rank else f"failed: {NAMED}") in caplog.text
    assert made.leader.engine.stats()["workers"] == 1
    if rank:
        until(lambda: bool(made.workers[1].errors))
        assert isinstance(made.workers[1].errors[0], DeviceError)


@pytest.mark.parametrize("way", ["read", "write"])
def test_a_gpu_that_is_full_when_keys_and_values_are_gathered_costs_no_token(
    way: str, group: Callable[..., Group], serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    expected = serve().ask([7] * 100, max_tokens=24).tokens
    made = group("0:2", "2:4", gpu=host_gpu).start()
    made.wait_full()

    def is_full(*_: Any) -> Any:
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(BlockCopies, way, is_full)
    answer = made.leader.ask([7] * 100, max_tokens=24)
    answer.next()
    made.leader.engine.consolidate("down")  # type: ignore[attr-defined]
    assert answer.tokens == expected
    assert "alone" in [stage.name for stage in made.leader.timeline.stages()]
    assert NAMED in caplog.text


class BrokenLink(HostLink):
    """Fails as soon as it is ``open``."""

    def copy(self, target: Tensor, source: Tensor, *, urgent: bool, stored: Any = None) -> Arrived:
        assert self.open.wait(60)
        raise DeviceError("copying weights to the device: CUDA_ERROR_ILLEGAL_ADDRESS (700)")


@pytest.mark.parametrize("rest", [False, True])
def test_an_upload_that_fails_leaves_the_leader_with_its_reason(
    rest: bool, group: Callable[..., Group], serve: Any, caplog: Any
) -> None:
    class BrokenGpu(HostGpu):
        def open_link(self, *, in_background: bool) -> HostLink:
            return BrokenLink(self.device) if rest else super().open_link(in_background=in_background)

    def broken() -> HostGpu:
        gpu = BrokenGpu(Recorder(), strict=True)
        if not rest:
            gpu.link = BrokenLink(gpu.device)
            gpu.link.open.clear()
        return gpu

    expected = serve().ask(PROMPT, max_tokens=12).tokens
    made = group("0:2", "2:4", gpu=host_gpu)
    made.add(0)
    worker: Any = made.add(1, gpu=broken).engine
    worker._gpu.link.open.set()
    assert made.leader.ask(PROMPT, max_tokens=12).tokens == expected
    if rest:  # the group goes on, as the worker needs no more to be a part of it
        until(lambda: made.workers[1].engine._rest_error is not None)  # type: ignore[attr-defined]
        assert made.formed
    else:
        assert "worker 1 is lost: copying weights to the device: CUDA_ERROR_ILLEGAL_ADDRESS (700)" in caplog.text


def test_workers_on_different_devices_are_refused(group: Callable[..., Group], caplog: Any) -> None:
    made = group("0:2", "2:4")
    made.add(0)
    made.add(1, gpu=host_gpu)
    assert made.leader.ask("A").last.finish_reason == "length"
    assert "need one kind of device to compute on (--device); found 'cpu' and 'cuda'" in caplog.text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_gpu_of_a_pair_parts_it_and_costs_no_token(
    rank: int, group: Callable[..., Group], serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    alone, prompts = serve(), [[number] * (5 + 9 * number) for number in (3, 5, 7)]
    expected = [alone.ask(prompt, max_tokens=9).tokens for prompt in prompts]
    made = group("0:4", "0:4", mode="disaggregated", gpu=host_gpu)
    for number in range(2):
        made.add(number, layers=None)
    until(lambda: made.leader.engine.stats()["paired"] == 1)

    def is_full(*_: Any) -> Any:
        raise torch.OutOfMemoryError(FULL)

    monkeypatch.setattr(made.workers[rank].engine.runner, "forward", is_full)  # an instance's steps do not use it
    answers = [made.leader.ask(prompt, max_tokens=9) for prompt in prompts]
    assert [answer.tokens for answer in answers] == expected
    until(lambda: made.leader.engine.stats()["paired"] == 0)
    assert NAMED in caplog.text
    made.workers[1].engine.wait_ready()
    assert made.workers[1].ask(prompts[0], max_tokens=9).tokens == expected[0]
    for worker in made.workers:
        until(lambda worker=worker: worker.engine.stats()["kv_tokens_used"] == 0)  # type: ignore[misc]


def test_a_pair_on_different_devices_is_refused(group: Callable[..., Group], caplog: Any) -> None:
    made = group("0:4", "0:4", mode="live")
    made.add(0, layers=None)
    made.add(1, layers=None, gpu=host_gpu)
    made.workers[1].engine.wait_ready()
    assert "live scaling was refused: all workers of a group need one kind of device" in caplog.text


def test_a_group_of_vllm_takes_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"group": "g", "token": "t", "rank": 0, "size": 2, "leader": "127.0.0.1:1"}')
    monkeypatch.setattr(vllm_engine, "choose", lambda *_: "cuda")
    settings = replace(SETTINGS, group=str(plan), layers="0:2")
    with pytest.raises(ConfigError, match="a group of vLLM compute on CPUs; expected --device cpu, or --engine torch"):
        vllm_engine.open_engine(None, settings, Timeline.create("engine"))  # type: ignore[arg-type]


def test_a_worker_process_takes_the_device_of_its_settings(tmp_path: Path) -> None:
    if obstacle(os.environ) is None:
        pytest.skip("this machine has a GPU")
    arguments = ["--model", str(tmp_path), "--socket", str(tmp_path / "s"), "--layers", "0:1", "--group", "g"]
    command = [sys.executable, "-m", "medusa_cluster.group.worker", *arguments]
    ended = subprocess.run(
        command, env={**os.environ, "MEDUSA_DEVICE": "cuda"}, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode == 2
    assert "--device cuda cannot be used" in ended.stderr


def test_no_block_is_written_after_the_gathering_was_closed() -> None:
    """A worker sends on when another one is lost, and the blocks may belong to other sequences by then."""
    cache, greeted = KvCache(KvShape(2, 1, 4, torch.float32), 4), threading.Event()
    channels: list[Any] = []

    def accept(greeting: Greeting) -> None:
        channels.append(greeting.channel)
        greeted.set()

    plan = GroupPlan("g", "t", 0, 2, "127.0.0.1:1")
    listener = Listener("127.0.0.1", 0, group=plan.number, access=plan.access, accept=accept, link=None)
    channel = connect(
        f"127.0.0.1:{listener.port}", group=plan.number, access=plan.access, rank=0, purpose="blocks", deadline=0.0
    )
    assert greeted.wait(60)
    cache.pool.fill_(7)
    ended: list[Any] = []
    gathering = Gathering(cache, [BlockSource(LayerRange(1, 2, 2), channel)], plan.number, ended.append)
    gathering.fetch([1, 2])
    assert channels[0].receive().kind is Kind.FETCH
    blocks = BlockCopies(cache, 1, 2)
    body = bytes(blocks.block_bytes)
    channels[0].send(Message(Kind.BLOCK, plan.number, rows=1, body=body))
    until(lambda: bool((cache.pool[1, :, 1] == 0).all()))
    gathering.close()
    channels[0].send(Message(Kind.BLOCK, plan.number, rows=2, body=body))
    until(lambda: bool(ended))
    assert (cache.pool[1, :, 2] == 7).all()
    assert (cache.pool[0] == 7).all()
    for one in (channel, channels[0], listener):
        one.close()


def test_blocks_keep_their_numbers_behind_the_spare_ones() -> None:
    gpu = host_gpu()
    cache = KvCache(KvShape(3, 1, 4, torch.float32), 4, gpu.memory, numbers=range(5, 8))
    copies = BlockCopies(cache, 6, 8)
    numbers = cache.blocks.allocate(2)
    assert numbers == [SPARE_BLOCKS, SPARE_BLOCKS + 1]
    written = torch.arange(2 * 2 * 2 * 16 * 4, dtype=torch.float32).view(2, *copies.shape)
    with torch.inference_mode():
        copies.write(numbers, list(written))
        assert torch.equal(copies.read(numbers), written)
        assert torch.equal(copies.read(numbers[::-1]), written.flip(0))
    assert not copies.has(SPARE_BLOCKS + 4)
