"""Every strategy computes what eager loading computes; and what the benchmark says of it is computed rightly."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from medusa_adapters.bench.result import Result
from medusa_runtime.config import Settings
from medusa_runtime.errors import CorruptError, MedusaError
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.imports.lazy_torch import TESTED
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

from benchmarks.cicada import __main__ as command
from benchmarks.cicada import pipeline, session
from benchmarks.cicada.baselines import BASELINES, BEFORE, idle, optimus, pool
from benchmarks.cicada.figure import _place
from benchmarks.cicada.limited import measure_limited
from benchmarks.cicada.origin import LimitedServer, serving
from benchmarks.cicada.pipeline import Stage
from benchmarks.cicada.replay import invocations, replay
from benchmarks.cicada.runner import Container, Inference
from benchmarks.cicada.sample import Request
from benchmarks.cicada.session import Session
from benchmarks.cicada.strategies import OURS, STRATEGIES, Job
from benchmarks.cicada.workloads.checkpoint import checkpoint
from benchmarks.cicada.workloads.workload import NAMES, Step, workload

TINY = ("tiny-vgg", "tiny-resnet", "tiny-bert", "tiny-llama", "tiny-opt")


@pytest.fixture(autouse=True)
def _dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", TINY)
def test_every_strategy_gives_the_output_of_eager_loading(name: str, tmp_path: Path) -> None:
    chosen = workload(name)
    folder = checkpoint(chosen, tmp_path)
    torch.set_default_dtype(chosen.dtype)
    outputs, units = {}, {}
    for strategy, run in {**STRATEGIES, **BASELINES}.items():
        timeline, region = Timeline.create("test"), Region.create()
        if strategy in OURS:
            prefetch(region, str(folder), settings=Settings(), timeline=timeline)
        with torch.inference_mode():
            outputs[strategy] = run(Job(chosen, folder / "model.safetensors", timeline, region))
        units[strategy] = {(stage.name, stage.detail.get("unit")) for stage in timeline.stages()}
        region.close()
    eager = outputs.pop("sequential")
    assert eager.isfinite().all()
    assert eager.std() > 0
    for strategy, output in outputs.items():
        assert torch.equal(output, eager), strategy
    layers = {step.name for step in chosen.steps}
    assert all({unit for stage, unit in found if stage == "execute"} >= layers for found in units.values())
    for strategy in ("pisel", "mini", "preload"):
        assert {unit for stage, unit in units[strategy] if stage in ("construct", "apply")} == layers


def test_optimus_makes_only_the_layers_that_the_other_model_lacks(tmp_path: Path) -> None:
    chosen = workload("tiny-vgg")
    path = checkpoint(chosen, tmp_path) / "model.safetensors"
    container = idle(chosen, path)
    kept, removed = {id(layer) for layer in container.layers}, container.layers.pop()
    used: list[int] = []

    def watched(step: Step) -> Step:
        def run(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            used.append(id(layer))
            return step.run(layer, x)

        return replace(step, run=run)

    observed = replace(chosen, steps=tuple(watched(step) for step in chosen.steps))
    with torch.inference_mode():
        found = optimus(Job(observed, path, Timeline.create("test"), kept=container))
        assert torch.equal(found, STRATEGIES["sequential"](Job(chosen, path, Timeline.create("test"))))
    assert id(removed) not in used
    assert len(kept & {*used}) == len(used) - 1
    assert idle(workload("tiny-bert"), path).layers == []


def test_tetris_keeps_a_model_in_shared_memory_at_addresses_that_products_like(tmp_path: Path) -> None:
    chosen = workload("tiny-resnet")
    tensors = pool(chosen, checkpoint(chosen, tmp_path) / "model.safetensors")
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors.values())
    assert {*tensors} == {*chosen.factory().state_dict()}
    assert {*BEFORE} == {*BASELINES}


def test_a_strategy_raises_what_its_threads_raise(tmp_path: Path) -> None:
    chosen = workload("tiny-bert")
    other = checkpoint(workload("tiny-vgg"), tmp_path) / "model.safetensors"
    for strategy in ("sequential", "pisel", "mini", "preload"):
        with pytest.raises(RuntimeError, match=r"Missing key|missing"), torch.inference_mode():
            STRATEGIES[strategy](Job(chosen, other, Timeline.create("test")))


def test_utilisation_counts_each_moment_once() -> None:
    stages = [
        Stage("construct", "function", 0.0, 1.0, ""),
        Stage("fetch", "prefetcher", 0.5, 2.0, ""),
        Stage("apply", "function", 2.5, 3.0, "a"),
        Stage("execute", "function", 1.0, 4.0, "a"),
        Stage("wait", "function", 1.0, 3.0, "a"),
        Stage("unknown", "function", 0.0, 9.0, ""),
    ]
    assert pipeline.utilisation(stages) == pytest.approx(3.5 / 4)
    assert pipeline.totals(stages) == pytest.approx((3.5, 4.0))
    assert pipeline.working(stages) == pytest.approx({"L": 1.0, "R": 1.5, "A": 0.5, "E": 1.0})
    apart = [Stage("execute", "f", 0.0, 1.0, "a"), Stage("execute", "f", 3.0, 4.0, "b")]
    assert pipeline.waiting(apart) == {"E": 2.0}
    assert pipeline.without([(0, 10)], [(2, 3), (9, 12)]) == [(0, 2), (3, 9)]


def test_the_trace_is_stretched_and_drawn_the_same_each_time() -> None:
    found = invocations(["a", "b"], 100, mean_distance_s=0.5)
    assert found == invocations(["a", "b"], 100, mean_distance_s=0.5)
    assert len(found) == 100
    assert found[0].at == 0
    assert found[-1].at == pytest.approx(49.5)
    assert sorted(found) == found
    assert {one.model for one in found} == {"a", "b"}
    assert len(invocations(["a"], 1)) == 1


def test_the_limited_origin_serves_ranges_and_delays_some(tmp_path: Path) -> None:
    data = bytes(range(256)) * 12_000
    (tmp_path / "file").write_bytes(data)
    with serving(tmp_path, 1e9, 2, 0.01) as url:
        for start, stop in ((0, 100), (5, 2_000_000), (1_000_000, 3_000_000)):
            request = urllib.request.Request(f"{url}/file", headers={"Range": f"bytes={start}-{stop - 1}"})
            with urllib.request.urlopen(request) as answer:
                assert answer.read() == data[start:stop]
    with LimitedServer(tmp_path, 1e9, 3, 0.5) as server:
        assert [server.is_late() for _ in range(7)] == [False, False, True, False, False, True, False]


@pytest.mark.slow
def test_the_command_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["--models", "tiny-bert", "--strategies", "pisel,full", "--runs", "1", "--gates", "3"]
    arguments += ["--origin", "1"]
    arguments += ["--checkpoints", str(tmp_path / "kept"), "--json", str(tmp_path / "out.json")]
    assert command.main([*arguments, "--prepare"]) == 0
    assert (tmp_path / "kept" / "tiny-bert" / "model.safetensors").exists()
    assert command.main([*arguments, "--figures", str(tmp_path / "figures")]) == 0
    rows = {(row["name"], row["metric"]): row for row in json.loads((tmp_path / "out.json").read_text())["rows"]}
    names = {"full", "pisel", "limited", "limited-bound", "delayed", "delayed-bound", "built", "plain"}
    assert {name for name, _ in rows} == {f"tiny-bert/{name}" for name in names}
    assert rows["tiny-bert/full", "latency_s"]["runs"] == 1
    assert rows["tiny-bert/full", "latency_s"]["median"] > 0
    assert rows["tiny-bert/full", "peak_mb"]["median"] > rows["tiny-bert/full", "added_mb"]["median"]
    assert rows["tiny-bert/full", "peak_mb"]["median"] > rows["tiny-bert/full", "used_mb"]["median"] > 0
    if torch.__version__.startswith(TESTED) and torch.version.cuda is None:  # else this torch is imported plainly
        assert rows["tiny-bert/full", "used_mb"]["median"] < 0.9 * rows["tiny-bert/pisel", "used_mb"]["median"]
    assert 0 < rows["tiny-bert/full", "utilisation"]["median"] <= 1
    assert (tmp_path / "figures" / "tiny-bert.svg").read_text().count("<path") > 10
    assert (tmp_path / "figures" / "tiny-bert.png").read_bytes().startswith(b"\x89PNG")
    verdicts = capsys.readouterr().out.partition("verdict, found, promised")[2]
    for figure in (
        "pipeline utilisation",
        "a warm forward",
        "limited origin",
        "delayed origin",
        "latency_s over PISeL's",
    ):
        assert f"tiny-bert: {figure}" in verdicts


def test_the_trace_is_replayed_against_real_processes(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    result = Result()
    folder = checkpoint(workload("tiny-bert"), tmp_path)
    replay(result, {"tiny-bert": folder}, ["full"], 2, scratch, mean_distance_s=0.05)
    metrics = {(row.name, row.metric): row.median for row in result.rows}
    assert 0 < metrics["trace/full", "p50_s"] <= metrics["trace/full", "p95_s"] <= metrics["trace/full", "p99_s"]


@pytest.mark.slow
def test_origins_and_trace(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    folder = checkpoint(workload("tiny-bert"), tmp_path)
    result = Result()
    measure_limited(result, "tiny-bert", tmp_path, 1, scratch, strategies=("full", "sequential"))
    replay(result, {"tiny-bert": folder}, ["full", "sequential"], 3, scratch, mean_distance_s=0.05)
    metrics = {(row.name, row.metric): row.median for row in result.rows}
    for origin in ("limited", "delayed"):
        assert metrics[f"tiny-bert/{origin}-sequential", "latency_s"] > 0
        assert metrics[f"tiny-bert/{origin}", "latency_s"] > metrics[f"tiny-bert/{origin}-bound", "latency_s"] > 0
    assert 0 < metrics["trace/full", "p50_s"] <= metrics["trace/full", "p95_s"] <= metrics["trace/full", "p99_s"]
    assert list(scratch.iterdir()) == []


class Scripted:
    """A container that starts nothing and answers at once, another output under "mini"."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_ready(self) -> None: ...

    def infer(self, request: Request, *, watch: bool = False) -> Inference:
        return Inference(0.1, "other" if request.strategy == "mini" else "eager", [])


def test_another_output_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Even when only one strategy differs."""
    monkeypatch.setattr(session, "Container", Scripted)
    with pytest.raises(CorruptError, match="tiny-bert/mini: the output is not that of eager loading"):
        command.main(["--models", "tiny-bert", "--strategies", "mini", "--runs", "1", "--checkpoints", str(tmp_path)])


def test_no_round_begins_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(session, "Container", Scripted)
    folders = {"tiny-bert": checkpoint(workload("tiny-bert"), tmp_path)}
    rounds = Session(folders, ("full",), tmp_path, minutes=0.0)
    rounds.round(0)  # whatever the time, of the first one there is a sample
    rounds.round(1)
    assert len(rounds.timed["tiny-bert", "full"]) == 1


def test_a_part_has_its_layers_colour() -> None:
    layers = ["conv1", "layer1.1", "layer1.10"]
    places = [_place(name, layers) for name in ("conv1", "layer1.1.conv1", "layer1.10.bn1", "layer1", "")]
    assert places == [0, 0.5, 1, None, None]


def test_bad_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "matplotlib" else name)
    for arguments, message in (
        (["--models", "vgg99,tiny-vgg"], "--models: expected names of vgg11, vgg13, vgg16"),
        (["--models", "vgg99,tiny-vgg"], "found vgg99$"),
        (["--strategies", "magic"], "--strategies: expected names of sequential, pisel"),
        (["--models", "tiny-bert", "--runs", "0"], "--runs: expected 1 or more"),
        (["--models", "tiny-bert", "--figures", "folder"], "packages are missing: pip install matplotlib$"),
    ):
        with pytest.raises(MedusaError, match=message):
            command.main([*arguments, "--checkpoints", str(tmp_path)])
    with Container(tmp_path, "full") as container:
        container.wait_ready()
        with pytest.raises(MedusaError, match="tiny-bert/full failed"):
            container.infer(Request("tiny-bert", "full", str(tmp_path / "nothing")))
    assert {"resnet50", "resnet101", "resnet152", "vgg16", "vgg19", "bert-base", "llama-1b", "opt-1.3b"} <= set(NAMES)
