"""The engine on a GPU of host memory: its graphs are recorded callables, and everything else is as on a GPU."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from host_gpu import (
    PROMPTS,
    Bundled,
    HostGpu,
    HostKernels,
    HostRestorer,
    Recorded,
    Recorder,
    answers,
    no_triton,
    region,
    runner_of,
    start,
)
from medusa_runtime.config import Settings
from medusa_runtime.engine.gpu.decode_graphs import BATCH_SIZES, sizes_for
from medusa_runtime.engine.gpu.device import BundledGraphs, bundled_graphs
from medusa_runtime.engine.gpu.footprint import measure_kv_plan
from medusa_runtime.engine.gpu.runner import GpuRunner
from medusa_runtime.engine.torch import engine as torch_engine
from medusa_runtime.engine.torch.kv_cache import SPARE_BLOCKS
from medusa_runtime.errors import DeviceError, StateError
from medusa_runtime.region.reader import Region
from medusa_runtime.state.graphs import Blueprints
from medusa_runtime.state.graphs.blob_format import encode_blueprints
from medusa_runtime.state.graphs.restoration.quarantine import FILE
from medusa_runtime.state.kinds import CUDA_GRAPHS, file_name
from waiting import until

__all__ = ["no_triton", "region", "start"]


def test_sizes_are_vllms_defaults() -> None:
    assert len(BATCH_SIZES) == 35
    assert BATCH_SIZES[:5] == (1, 2, 4, 8, 16)
    assert BATCH_SIZES[-1] == 256
    assert sizes_for(1) == (1,)
    assert sizes_for(5) == (1, 2, 4, 8)
    assert sizes_for(64) == BATCH_SIZES[:11]
    assert sizes_for(1000) == BATCH_SIZES


@pytest.mark.parametrize("strict", [False, True])
def test_graphs_give_the_tokens_that_a_cpu_gives(strict: bool, start: Callable[..., Any]) -> None:
    expected = answers(start(None))
    recorder = Recorder()
    served = start(HostGpu(recorder, strict=strict))
    until(lambda: len(recorder.captured) == 4)
    assert answers(served) == expected
    graphs = runner_of(served).graphs
    assert graphs is not None
    assert graphs.replays > 0
    assert list(graphs.graphs) == [8, 4, 2, 1], "captured from the largest on, whose memory the others share"
    assert recorder.warm_ups == 4


def test_prompts_are_scored_beside_decodes_in_graphs(start: Callable[..., Any]) -> None:
    """Strictly, so that every tensor is on the right device. Some chunks have one token, but do not run in a graph."""
    options = {"prompt_logprobs": 2, "max_tokens": 4, "allowed_token_ids": (5, 9, 77), "bad_words": ("e",)}
    expected = [start(None).ask(prompt, **options).wait() for prompt in PROMPTS[:3]]
    served = start(HostGpu(Recorder(), strict=True), max_batched_tokens=8)
    until(lambda: not runner_of(served).graphs.pending)
    company = [served.ask("A", max_tokens=110) for _ in range(7)]  # they leave one token of a step to others
    for answer in company:
        answer.next()
    for prompt, wanted in zip(PROMPTS[:3], expected, strict=True):
        answer = served.ask(prompt, **options)
        found = answer.wait().deltas[0].prompt_logprobs
        assert answer.tokens == wanted.tokens
        assert list(found.token_ids) == list(wanted.deltas[0].prompt_logprobs.token_ids)
        assert list(found.logprobs) == pytest.approx(list(wanted.deltas[0].prompt_logprobs.logprobs), abs=1e-3)
    assert all(answer.last.finish_reason == "length" for answer in company)
    assert runner_of(served).graphs.replays > 0


def test_a_batch_runs_in_the_next_size_up(start: Callable[..., Any]) -> None:
    recorder = Recorder()
    served = start(HostGpu(recorder), max_concurrency=4)
    until(lambda: len(recorder.captured) == 3)
    graphs = runner_of(served).graphs
    assert graphs is not None
    assert [graphs.size_for(count) for count in (1, 2, 3, 4, 5)] == [1, 2, 4, 4, None]
    by_size = {size: recorder.captured[number] for number, size in enumerate((4, 2, 1))}
    three = [served.ask(prompt, max_tokens=30) for prompt in PROMPTS[:3]]
    assert all(len(answer.tokens) == 30 for answer in three)
    assert by_size[4].replays > 0, "three sequences run in the graph of four"


def test_padding_changes_nothing_that_is_read(start: Callable[..., Any]) -> None:
    gpu = HostGpu(Recorder())
    served = start(gpu)
    graphs = runner_of(served).graphs
    assert graphs is not None
    until(lambda: not graphs.pending)
    answers(served)
    cache = served.engine._cache
    used, spare = cache.pool[:, :, SPARE_BLOCKS:], cache.pool[:, :, :SPARE_BLOCKS]
    assert cache.spare == 0
    assert used.shape[2] == cache.blocks.blocks
    untouched = [block for block in range(used.shape[2]) if used[:, :, block].isnan().all()]
    assert untouched, "the pool was cleared, or padding was written to blocks of others"
    assert not spare[:, :, 0, 0].isnan().any()
    assert spare[:, :, 0, 1:].isnan().all()
    assert spare[:, :, 1:].isnan().all()


def test_decodes_run_by_hand_without_a_graph(start: Callable[..., Any]) -> None:
    expected = answers(start(None))
    assert answers(start(HostGpu(None))) == expected


def test_capturing_that_fails_is_given_up_and_decoding_goes_on(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    expected = answers(start(None))
    served = start(HostGpu(Recorder(failing_at=1)))
    graphs = runner_of(served).graphs
    assert graphs is not None
    until(lambda: not graphs.pending)
    assert list(graphs.graphs) == [8]
    assert answers(served) == expected
    warnings = [record for record in caplog.records if "without a CUDA graph" in record.message]
    assert len(warnings) == 1
    assert "not permitted when stream is capturing" in warnings[0].message


def test_graphs_are_captured_while_the_weights_still_come(start: Callable[..., Any]) -> None:
    expected = answers(start(None))
    gpu, recorder = HostGpu(recorder := Recorder()), recorder
    gpu.link.open.clear()
    served = start(gpu)
    until(lambda: len(recorder.captured) == 4)
    answer = served.ask(PROMPTS[0], max_tokens=20)
    time.sleep(0.05)
    assert answer.incoming.empty()
    gpu.link.open.set()
    assert answer.tokens == expected[0]


def test_an_engine_that_is_never_idle_captures_the_graphs_of_its_batches(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(start(None))
    monkeypatch.setattr(GpuRunner, "use_idle_time", lambda self: False)
    served = start(HostGpu(recorder := Recorder(), strict=True))
    assert served.ask(PROMPTS[0], max_tokens=20).tokens == expected[0]
    graphs = runner_of(served).graphs
    assert graphs is not None
    assert list(graphs.graphs) == [8, 1], "the largest, whose memory the others share, and the one that is used"
    assert [graph.replays for graph in recorder.captured] == [1, 18]
    assert answers(served) == expected


def test_a_first_token_does_not_wait_for_the_kernels_of_decode_steps(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(start(None))
    kernels = HostKernels(monkeypatch)
    served = start(HostGpu(recorder := Recorder(), strict=True))
    served.engine.wait_ready()
    answer = served.ask(PROMPTS[0], max_tokens=20)
    answer.next()
    assert answer.incoming.empty()
    assert not recorder.captured
    kernels.compiled.set()
    assert answer.tokens == expected[0]
    assert kernels.waited == {"decode-kernels"}, "a step launched them before"
    assert "decode_kernels" in [stage.name for stage in served.timeline.stages()]


def test_restored_graphs_are_used_and_the_missing_ones_captured(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(start(None))
    monkeypatch.setattr(torch_engine, "bundled_graphs", lambda region, settings: Bundled(b"1 2 4"))
    gpu, recorder = HostGpu(recorder := Recorder()), recorder
    gpu.link.open.clear()
    served = start(gpu)
    graphs = runner_of(served).graphs
    assert graphs is not None
    until(lambda: len(gpu.built) == 3)
    assert gpu.built == [(1,), (2,), (4,)], "what needs no weights is done while they come, bit by bit"
    time.sleep(0.05)
    assert not gpu.restores, "what validates itself by replays needs the weights"
    assert not recorder.captured
    gpu.link.open.set()
    until(lambda: not graphs.pending)
    assert gpu.restores == [(1, 2, 4)]
    assert len(recorder.captured) == 2
    assert list(graphs.graphs) == [2, 4, 8, 1]
    assert answers(served) == expected
    (stage,) = [stage for stage in served.timeline.stages() if stage.name == "restore_graphs"]
    assert stage.detail == {"graphs": 2}


def test_a_first_token_does_not_wait_for_graphs(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    late = Bundled(b"1 2 4")
    late.arrived.clear()
    monkeypatch.setattr(torch_engine, "bundled_graphs", lambda region, settings: late)
    gpu = HostGpu(recorder := Recorder())
    served = start(gpu)
    served.engine.wait_ready()
    time.sleep(0.05)  # the engine is idle, and waits for requests
    assert len(served.ask(PROMPTS[0], max_tokens=1).tokens) == 1
    assert not gpu.restores
    assert not recorder.captured, "they may turn out to be there"
    late.arrived.set()
    assert len(served.ask(PROMPTS[0], max_tokens=3).tokens) == 3
    assert gpu.restores[0] == (1, 2, 4)


def test_the_most_useful_graphs_are_restored_first_and_the_others_one_by_one(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundled = " ".join(map(str, sizes_for(32)))
    monkeypatch.setattr(torch_engine, "bundled_graphs", lambda region, settings: Bundled(bundled.encode()))
    gpu, recorder = HostGpu(recorder := Recorder()), recorder
    served = start(gpu, max_concurrency=32)
    graphs = runner_of(served).graphs
    assert graphs is not None
    until(lambda: not graphs.pending)
    assert set(gpu.built) <= {(1,), (2,), (4,), (8,), (32,)}, "as many as the weights leave time for"
    assert gpu.restores == [(1, 2, 4, 8, 32), (16,), (24,)]
    assert len(recorder.captured) == 1, "the one that does not fit"
    names = [stage.name for stage in served.timeline.stages() if stage.name.endswith("_graphs")]
    assert names == ["prepare_graphs", *["restore_graphs"] * 3]


def be_busy_with_a_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an engine have a bundle with a graph of each size, and no idle time."""
    bundled = " ".join(map(str, sizes_for(32)))
    monkeypatch.setattr(torch_engine, "bundled_graphs", lambda region, settings: Bundled(bundled.encode()))
    monkeypatch.setattr(GpuRunner, "use_idle_time", lambda self: False)


def test_an_engine_that_is_never_idle_restores_the_graphs_of_its_batches(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_busy_with_a_bundle(monkeypatch)
    served = start(gpu := HostGpu(recorder := Recorder()), max_concurrency=32)
    together = [served.ask(prompt, max_tokens=20) for prompt in PROMPTS * (9 // len(PROMPTS) + 1)]
    assert 8 < len(together) <= 16
    assert all(len(answer.tokens) == 20 for answer in together)
    assert gpu.restores == [(1, 2, 4, 8, 32), (16,)], "a batch of 9 would run in the graph for 32"
    assert not recorder.captured


def test_an_engine_that_is_never_idle_tries_larger_graphs_of_the_bundle_and_then_captures(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_busy_with_a_bundle(monkeypatch)
    gpu = HostGpu(Recorder())

    def none_fits(self: HostRestorer, sizes: Sequence[int]) -> dict[int, Recorded]:
        gpu.restores.append(tuple(sizes))
        return {}

    monkeypatch.setattr(HostRestorer, "restore_sizes", none_fits)
    served = start(gpu, max_concurrency=32)
    assert len(served.ask(PROMPTS[0], max_tokens=20).tokens) == 20
    assert gpu.restores == [(1, 2, 4, 8, 32), (16,), (24,)]
    graphs = runner_of(served).graphs
    assert graphs is not None
    assert list(graphs.graphs) == [32, 1]


@pytest.mark.parametrize("data", [b"damaged", None])
def test_a_bundle_that_is_of_no_use_is_replaced_by_capturing(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, data: bytes | None
) -> None:
    monkeypatch.setattr(torch_engine, "bundled_graphs", lambda region, settings: Bundled(data))
    recorder = Recorder()
    served = start(HostGpu(recorder))
    until(lambda: len(recorder.captured) == 4)
    assert len(served.ask(PROMPTS[0], max_tokens=5).tokens) == 5


def test_graphs_that_broke_a_context_before_are_captured(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch_engine, "bundled_graphs", lambda region, settings: Bundled(b"breaks", reason="fault"))
    served = start(HostGpu(recorder := Recorder()))
    until(lambda: len(recorder.captured) == 4)
    assert len(served.ask(PROMPTS[0], max_tokens=5).tokens) == 5
    assert sum("broke the device's context before (fault)" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("data", [b"breaks", b"breaks later"])
def test_a_broken_context_is_written_down_before_the_engine_goes(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    bundled = Bundled(data)
    monkeypatch.setattr(torch_engine, "bundled_graphs", lambda region, settings: bundled)
    gpu = HostGpu(Recorder())
    served = start(gpu)
    if data == b"breaks later":
        served.ask(PROMPTS[0], max_tokens=5)
    assert gpu.abandoned.wait(60)
    assert len(bundled.noted) == 1


def test_where_nothing_can_be_written_down_the_error_ends_the_engine(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new engine would fail in the same way, again and again."""
    bundled = Bundled(b"breaks", writable=False)
    monkeypatch.setattr(torch_engine, "bundled_graphs", lambda region, settings: bundled)
    gpu = HostGpu(Recorder())
    served = start(gpu)
    until(lambda: not served.thread.is_alive())
    assert not gpu.abandoned.is_set()
    assert [type(error) for error in served.errors] == [DeviceError]


def test_a_gpus_plan_is_measured_where_its_graphs_are_captured(start: Callable[..., Any]) -> None:
    class Memory:
        def free(self) -> int:
            return 0

        def peak(self, work: Callable[[], object]) -> int:
            work()
            return 10 << 20

    served = start(HostGpu(None), max_concurrency=2, max_batched_tokens=100)
    runner, settings = runner_of(served), Settings(max_concurrency=2, max_batched_tokens=100)
    made = measure_kv_plan(Memory(), runner.model, runner.cache, settings, graph_bytes=7 << 20)
    logits = 2 * 2 * runner.model.config.vocab_size * 4
    assert (made.activation_bytes, made.graph_bytes) == ((10 << 20) + logits, 7 << 20)
    assert made.blocks == 2 * -(-runner.model.config.max_positions // 16)
    (stage,) = [stage for stage in served.timeline.stages() if stage.name == "kv_plan"]
    assert stage.detail["source"] == "computed"


def test_a_bundles_graphs_are_used_as_the_settings_say(caplog: pytest.LogCaptureFixture) -> None:
    class WithGraphs:
        from_agent = False

        def has_code(self, name: str) -> bool:
            return name == ".medusa/cuda-graphs"

    region: Any = WithGraphs()
    assert bundled_graphs(region, Settings()) is not None
    with caplog.at_level("INFO"):
        assert bundled_graphs(region, Settings(graphs="capture")) is None
        assert bundled_graphs(region, Settings(), auto_restores=False) is None
    assert "the state bundle's CUDA graphs are not used: --graphs is capture" in caplog.text
    assert "the state bundle's CUDA graphs are not used: --graphs is auto" in caplog.text
    assert bundled_graphs(region, Settings(graphs="restore"), auto_restores=False) is not None


class WithGraphs:
    """A region with a bundle's graphs."""

    from_agent = False

    def __init__(self, data: bytes) -> None:
        self.data = data

    def view_code(self, name: str, timeout_s: float | None = None) -> memoryview:
        return memoryview(self.data)


def test_graphs_that_broke_a_context_are_known_by_their_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bundles that differ in nothing but an image are different bundles."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    images = {hashlib.sha256(code).hexdigest(): code for code in (b"kernels", b"fixed kernels")}
    bundles = [encode_blueprints(Blueprints(images={digest: code})) for digest, code in images.items()]

    def of(data: bytes) -> BundledGraphs:
        region: Any = WithGraphs(data)
        return BundledGraphs(region, Settings(graphs="restore"))

    broken = of(bundles[0])
    assert broken.read() == bundles[0]
    assert broken.quarantine("an illegal address")
    with pytest.raises(StateError, match=r"broke the device's context before \(an illegal address\)"):
        of(bundles[0]).read()
    assert of(bundles[1]).read() == bundles[1]
    with pytest.raises(StateError, match="expected materialized CUDA graphs, found b'graphs'; materialize again"):
        of(b"graphs").read()


@pytest.mark.parametrize("from_agent", [False, True])
def test_a_process_of_the_agents_writes_no_mark_where_a_function_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, from_agent: bool
) -> None:
    """It has the agent's rights, and the function may be another user's."""
    cache, named = tmp_path / "cache", tmp_path / "named"
    named.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    region = Region.create()
    region.from_agent = from_agent
    region.attach_file(file_name(CUDA_GRAPHS.name), encode_blueprints(Blueprints()))
    graphs = BundledGraphs(region, Settings(state=str(named), graphs="restore"))
    assert graphs.read()
    assert graphs.quarantine("an illegal address")
    region.close()
    assert [path.name for path in named.iterdir()] == ([] if from_agent else [FILE])
    assert (cache / "medusa" / FILE).exists() == from_agent
