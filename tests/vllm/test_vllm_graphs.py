"""vLLM's CUDA graphs, taken from one process into another: its own manager and inputs, on the fake driver."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.config import Settings
from medusa_runtime.engine.gpu import graph_capture
from medusa_runtime.errors import EngineError
from medusa_runtime.state.graphs import Blueprints
from medusa_runtime.state.graphs.blob_format import decode_blueprints, save_blueprints
from medusa_runtime.state.graphs.blueprint import GraphBlueprint

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

HERE, PYTHON = Path(__file__).parent, sys.executable
GRAPHS = HERE.parent / "runtime/state/graphs"
Run = Callable[..., dict[str, Any]]


def variables(fake_cuda: Path, where: int) -> dict[str, str]:
    cubins = GRAPHS / "cubins"
    found = {"FAKE_CUDA_LIBRARY": str(fake_cuda), "TOY_CUBINS": str(cubins), "FAKE_CUDA_BASE": hex(where)}
    return {**found, "FAKE_CUDA_LATE": "1"}


@pytest.fixture(scope="module")
def run(fake_cuda: Path) -> Run:
    def run(phase: str, where: int, starts: dict[str, dict[str, Any]]) -> dict[str, Any]:
        command = [PYTHON, str(HERE / "vllm_graphs_on_fake.py"), phase, json.dumps(starts)]
        environment = {**os.environ, **variables(fake_cuda, where)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, done.stderr[-3000:]
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    return run


@pytest.fixture(scope="module")
def made(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The offline phase's answers: of a model, of one that reads memory without a name, of piecewise ones."""
    folder = tmp_path_factory.mktemp("bundle")
    starts = {"plain": {"out": str(folder / "plain")}, "unnamed": {"out": str(folder / "unnamed"), "unnamed": True}}
    starts["product"] = {"out": str(folder / "product"), "product": True}
    starts["opaque"] = {"out": str(folder / "opaque"), "pieces": True, "opaque": True}
    starts["astray"] = {"out": str(folder / "astray"), "astray": True}
    starts["pieces"] = {"out": str(folder / "pieces"), "pieces": True}
    starts["table"] = {"out": str(folder / "table"), "pieces": True, "table": True}
    found = run("materialize", 0x610000000000, starts)
    return {**found, "path": str(folder / "plain"), **{f"{name} path": str(folder / name) for name in starts}}


@pytest.fixture
def python(fake_cuda: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """A function that lets processes that check a bundle start with these options, and run ``before`` first."""

    def install(*, where: int = 0x590000000000, before: str = "", **options: Any) -> None:
        script = f"exec {PYTHON} {HERE}/vllm_graphs_on_fake.py check '{json.dumps(options)}' $@"
        (tmp_path / "python").write_text(f"#!/bin/sh\n{before}\n{script}\n")
        (tmp_path / "python").chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        for name, value in variables(fake_cuda, where).items():
            monkeypatch.setenv(name, value)

    return install


@pytest.fixture
def check(python: Callable[..., None], tmp_path: Path) -> Callable[..., Blueprints]:
    """A function that checks an unchecked bundle in a process of its own, and returns what it has written."""

    def check(unchecked: str, **options: Any) -> Blueprints:
        python(**(options or {"pieces": True, "table": True}))
        graph_capture.run(Settings(model="m", engine="vllm"), tmp_path / "out", Path(unchecked), check=True)
        return decode_blueprints((tmp_path / "out").read_bytes())

    return check


_BROKE = "checking the materialized CUDA graphs failed: "
_STARTS: dict[str, dict[str, Any]] = {
    "all": {},
    "one": {"only": 2},
    "gpu": {"other_gpu": True},
    "cache": {"kv_blocks": 41},
    "weights": {"wrong_weights": True},
    "trigger": {"without_images": True},
    "product": {"product": True},
    "taken": {"product": True, "take": True},
    "pieces": {"pieces": True},
    "results": {"pieces": True, "wrong_results": True},
    "outputs": {"pieces": True, "wrong_pieces": True},
    "piece": {"pieces": True, "without": "mode=PIECEWISE tokens=2"},
}


@pytest.fixture(scope="module")
def restored(run: Run, made: dict[str, Any]) -> dict[str, Any]:
    """Several starts in another process, each in its own memory."""
    kinds = {name: [kind for kind in ("pieces", "product") if kind in one] for name, one in _STARTS.items()}
    paths = {name: made[f"{kind[0]} path" if kind else "path"] for name, kind in kinds.items()}
    return run("restore", 0x580000000000, {name: {**one, "bundle": paths[name]} for name, one in _STARTS.items()})


def test_memory_has_the_names_of_where_it_hangs(made: dict[str, Any]) -> None:
    plain = made["plain"]
    names = ["cudagraph_manager.hidden_states", "graph pool", "input_buffers.input_ids", "model.weights"]
    assert plain["names"] == names
    assert plain["inputs"] == ["input_buffers.input_ids"], "what no graph reads is not kept"
    assert plain["pinned"] == []
    assert plain["refused"] == {}
    assert len({digest for digests in plain["answers"].values() for digest in digests}) == 9


def test_an_old_address_that_nothing_reads_does_not_matter(
    check: Callable[..., Blueprints], run: Run, made: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two captures do not explain it. A third process, where vLLM's memory is elsewhere, finds the right outputs."""
    offline = made["opaque"]
    assert offline["refused"] == {}
    assert "5 graphs only fit where they were captured: gemv has a word" in offline["log"]
    assert len(offline["pinned"]) == 5, "three full ones, and the second piece of two batches"
    with caplog.at_level(logging.INFO):
        checked = check(made["opaque path"], pieces=True)
    assert "5 of 5 pinned graphs give their outputs with vLLM's memory elsewhere, too" in caplog.text
    assert checked.refused == {}
    pinned = {checked.ranges[number].name for graph in checked.graphs for number in graph.pinned}
    assert pinned == {"graph pool"}, "it was at its address there, so nothing shows that it may be elsewhere"
    starts = {"there": {}, "taken": {"take": True}}
    bundle = {"bundle": str(tmp_path / "out"), "pieces": True}
    found = run("restore", 0x580000000000, {name: {**bundle, **one} for name, one in starts.items()})
    for one, kind in (("there", "RestoredGraph"), ("taken", "FakeGraph")):
        assert found[one]["kinds"] == dict.fromkeys("421", kind)
        assert found[one]["entries"][1] == {"1": "FakeGraph", "2": kind, "4": kind}
        assert found[one]["answers"] == offline["answers"]
        assert found[one]["piecewise"] == offline["piecewise"]
    assert found["there"]["log"] == ""
    assert "captured, not restored: address: expected graph pool at 0x6" in found["taken"]["log"]


def test_a_word_that_matters_leaves_its_graph_out(check: Callable[..., Blueprints], made: dict[str, Any]) -> None:
    """In the third process other memory is where its kernel reads."""
    assert made["astray"]["refused"] == {}
    (pinned,) = made["astray"]["pinned"]
    assert " tokens=2 " in pinned
    ranges = decode_blueprints(Path(made["astray path"]).read_bytes()).ranges
    checked = check(made["astray path"], where=next(one.address for one in ranges if one.name == "model.weights"))
    assert checked.refused == {pinned: f"output: a replay of {pinned} did not give its stored outputs"}
    assert len(checked.graphs) == 2


def test_a_word_that_breaks_the_context_leaves_its_graph_out(
    python: Callable[..., None],
    run: Run,
    made: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing is there in the third process, which ends. A fourth checks the others."""
    monkeypatch.setattr("medusa_runtime.device.choice.choose", lambda device, environ: "cuda")
    # Another process has made the dump and the blueprints already.
    out = capture_from(made["astray path"], python, tmp_path)
    (pinned,) = made["astray"]["pinned"]
    assert f"another process goes on without {pinned}, which ended this one: {_BROKE}" in caplog.text
    assert f"{pinned}: a restored CUDA graph broke the context" in caplog.text
    checked = decode_blueprints(out.read_bytes())
    why = "output: the process that checked it broke its CUDA context, or did not end"
    assert checked.refused == {pinned: why}
    found = run("restore", 0x580000000000, {"others": {"bundle": str(out)}})["others"]
    assert found["kinds"] == {"4": "RestoredGraph", "2": "FakeGraph", "1": "RestoredGraph"}
    assert found["answers"] == made["astray"]["answers"]


def test_a_piece_that_breaks_the_context_leaves_its_batch_out(
    python: Callable[..., None],
    made: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A forward runs all pieces of a batch, and vLLM captures those of this batch at each start."""
    monkeypatch.setattr("medusa_runtime.device.choice.choose", lambda device, environ: "cuda")
    unchecked = decode_blueprints(Path(made["pieces path"]).read_bytes())
    batch = [graph.key for graph in unchecked.graphs if "PIECEWISE tokens=2 " in graph.key]
    assert len(batch) == 2
    graphs = [astray(graph) if graph.key == batch[0] else graph for graph in unchecked.graphs]
    save_blueprints(replace(unchecked, graphs=tuple(graphs)), tmp_path / "made")
    out = capture_from(tmp_path / "made", python, tmp_path, pieces=True)
    assert f"another process goes on without {', '.join(batch)}, which ended this one: {_BROKE}" in caplog.text
    checked = decode_blueprints(out.read_bytes())
    assert len(checked.graphs) == len(unchecked.graphs) - 2
    assert set(checked.refused) == set(batch)


def test_graphs_with_which_a_request_breaks_the_context_are_left_out(
    python: Callable[..., None],
    made: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All of them, since nothing says which one did. A fourth process answers the requests without them."""
    monkeypatch.setattr("medusa_runtime.device.choice.choose", lambda device, environ: "cuda")
    out = capture_from(made["path"], python, tmp_path, breaks=True)
    keys = sorted(graph.key for graph in decode_blueprints(Path(made["path"]).read_bytes()).graphs)
    checked = decode_blueprints(out.read_bytes())
    assert checked.graphs == ()
    assert sorted(checked.refused) == keys
    assert len([line for line in caplog.messages if line.startswith("another process goes on without")]) == 1
    assert "not all kernels of first requests" not in caplog.text


def capture_from(made: str | Path, python: Callable[..., None], folder: Path, **options: bool) -> Path:
    """Capture for the bundle in processes of which the first returns what was ``made``."""
    python(before=f'[ "$5" ] || {{ cp {made} "$3"; exit 0; }}', **options)
    out = graph_capture.capture("m", Settings(engine="vllm"), folder)
    assert out is not None
    return out


def astray(graph: GraphBlueprint) -> GraphBlueprint:
    """Let its first kernel read where there is nothing."""
    first, *others = graph.relocations
    blob = bytearray(graph.blob)
    blob[first.position : first.position + 8] = (0x1000).to_bytes(8, "little")
    return replace(graph, blob=bytes(blob), relocations=tuple(others))


def test_contents_of_memory_without_a_name_are_not_trusted(made: dict[str, Any]) -> None:
    """vLLM may write them at each step, at an address that a restored graph does not know."""
    refused = made["unnamed"]["refused"]
    assert len(refused) == 3
    assert all(why.startswith("contents: they read workspace 4096 0") for why in refused.values())


def test_cublas_workspace_is_in_the_pool(restored: dict[str, Any], made: dict[str, Any]) -> None:
    """At the pool's address in any process. Where that is taken, words are relocated, and one line says so."""
    offline = made["product"]
    assert offline["refused"] == {}
    assert [name for name in offline["names"] if name.startswith("workspace")] == []
    for name in ("product", "taken"):
        found = restored[name]
        assert found["kinds"] == dict.fromkeys("421", "RestoredGraph")
        assert found["answers"] == offline["answers"]
        assert found["forwards"] == 0
    assert restored["product"]["log"] == ""
    assert restored["taken"]["log"].count(" is taken: graph pool is at 0x5") == 1


def test_vllm_replays_restored_graphs_and_runs_no_forward(restored: dict[str, Any], made: dict[str, Any]) -> None:
    found = restored["all"]
    assert found["kinds"] == dict.fromkeys("421", "RestoredGraph")
    assert found["answers"] == made["plain"]["answers"]
    assert found["forwards"] == 0
    assert found["untouched"], "validation left its inputs behind"
    assert found["log"] == ""


def test_kernels_without_an_image_come_out_of_a_first_layer(restored: dict[str, Any], made: dict[str, Any]) -> None:
    """MEDUSA §5.2: vLLM's own warm-up and capture, of one layer, once."""
    found = restored["trigger"]
    assert found["kinds"] == dict.fromkeys("421", "RestoredGraph")
    assert found["answers"] == made["plain"]["answers"]
    assert (found["forwards"], found["layers"]) == (2, 2)
    assert found["untouched"]
    assert "captured" not in found["log"]


def test_what_is_missing_is_captured_into_the_same_outputs(restored: dict[str, Any], made: dict[str, Any]) -> None:
    found = restored["one"]
    assert found["kinds"] == {"4": "FakeGraph", "2": "RestoredGraph", "1": "FakeGraph"}
    assert found["answers"] == made["plain"]["answers"]
    assert found["forwards"] == 4, "a warm-up and a capture for each of the two others"
    assert found["log"].count("captured, not restored: absent") == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gpu", "gpu: made for gpu Fake B200, this is Fake H200"),
        ("cache", "library: made for kv_cache_bytes"),
        ("weights", "output: a replay of vllm mode=FULL tokens=4"),
    ],
)
def test_what_does_not_fit_is_captured(restored: dict[str, Any], made: dict[str, Any], name: str, reason: str) -> None:
    found = restored[name]
    assert found["kinds"] == dict.fromkeys("421", "FakeGraph")
    assert found["log"].count("captured, not restored") == 1
    assert reason in found["log"]
    assert (found["answers"] == made["plain"]["answers"]) == (name != "weights")
    calls = Counter(found["driver"])
    assert calls["cuLibraryUnload"] == calls["cuLibraryLoadData"]
    assert calls["cuMemRelease"] == calls["cuMemCreate"]
    assert calls["cuMemRelease"] or name == "gpu"


def test_piecewise_graphs_are_restored_but_for_the_smallest(restored: dict[str, Any], made: dict[str, Any]) -> None:
    """vLLM captures the smallest, since its first forward compiles. The others become entries of its wrappers."""
    found, offline = restored["pieces"], made["pieces"]
    assert offline["refused"] == {}
    assert found["log"] == ""
    assert found["entries"] == [{"1": "FakeGraph", "2": "RestoredGraph", "4": "RestoredGraph"}] * 2
    assert found["calls"] == [2, 2], "a warm-up and a capture"
    images = decode_blueprints(Path(made["pieces path"]).read_bytes()).images
    assert found["driver"]["cuLibraryLoadData"] == len(images) > 0, "full and piecewise graphs share them"
    assert found["piecewise"] == offline["piecewise"]
    assert len({digest for digests in found["piecewise"].values() for digest in digests}) == 6
    assert found["kinds"] == dict.fromkeys("421", "RestoredGraph")
    assert found["answers"] == offline["answers"]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("results", "piecewise CUDA graphs are captured, not restored: not enough values"),
        ("outputs", "captured, not restored: output: a forward of vllm mode=PIECEWISE tokens=4 "),
    ],
)
def test_piecewise_graphs_that_are_not_right_are_captured(
    restored: dict[str, Any], made: dict[str, Any], name: str, reason: str
) -> None:
    found = restored[name]
    assert found["entries"] == [dict.fromkeys("124", "FakeGraph")] * 2
    assert found["log"].count(reason) == 1
    assert found["piecewise"] == made["pieces"]["piecewise"]
    assert found["kinds"] == dict.fromkeys("421", "RestoredGraph"), "the full ones are as they were"


def test_a_batch_of_which_a_piece_is_missing_is_captured(restored: dict[str, Any], made: dict[str, Any]) -> None:
    found = restored["piece"]
    assert found["entries"] == [{"1": "FakeGraph", "2": "FakeGraph", "4": "RestoredGraph"}] * 2
    assert found["log"].count("2 CUDA graphs are captured, not restored: absent: it was not materialized") == 1
    assert found["piecewise"] == made["pieces"]["piecewise"]


def test_a_third_process_leaves_out_what_is_right_only_where_it_was_captured(
    check: Callable[[str], Blueprints], run: Run, made: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warm-up has written what the graphs of two rows read, and a start that restores them runs no warm-up."""
    assert made["table"]["refused"] == {}
    with caplog.at_level(logging.INFO):
        checked = check(made["table path"])
    batch, name = re.compile(r"vllm mode=(\w+) tokens=(\d)"), "{} {}".format
    kept = [name(*batch.findall(graph.key)[0]) for graph in checked.graphs]
    assert sorted(kept) == ["FULL 1", "FULL 4", "PIECEWISE 4", "PIECEWISE 4"], (
        "vLLM captures the smallest piecewise ones"
    )
    refused = [name(*batch.findall(key)[0]) for key in checked.refused]
    assert sorted(refused) == ["FULL 2", "PIECEWISE 2", "PIECEWISE 2"]
    assert all(
        re.match(r"output: a (replay|forward) of vllm .* did not give its", why) for why in checked.refused.values()
    )
    assert " ms  restored in a process of its own: {'graphs': 4, " in caplog.text
    start = {"bundle": str(tmp_path / "out"), "pieces": True, "table": True}
    found = run("restore", 0x580000000000, {"checked": start})["checked"]
    assert found["kinds"] == {"4": "RestoredGraph", "2": "FakeGraph", "1": "RestoredGraph"}
    assert found["entries"] == [{"1": "FakeGraph", "2": "FakeGraph", "4": "RestoredGraph"}] * 2
    assert found["answers"] == made["table"]["answers"]
    assert found["piecewise"] == made["table"]["piecewise"]


def test_a_graph_that_breaks_the_context_fails_the_check(
    check: Callable[[str], Blueprints],
    made: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("FAKE_CUDA_FAULT", "embed")
    expected = (
        r"(?s)^checking the materialized CUDA graphs failed: .*vllm mode=FULL tokens=4 [^:]*: a restored "
        r"CUDA graph broke the context .*ILLEGAL_ADDRESS"
    )
    with pytest.raises(EngineError, match=expected), caplog.at_level(logging.INFO):
        check(made["table path"])
    assert "the engine is closed" in caplog.messages
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_graph_that_hangs_ends_the_check_and_says_where(
    check: Callable[[str], Blueprints], made: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_HANG", "embed")
    monkeypatch.setattr(graph_capture, "_TIMEOUT_S", 60.0)
    with pytest.raises(
        EngineError, match=r"(?s)it was not done after 60 s: .*graph_state.py\", line \d+ in _verify_each"
    ):
        check(made["table path"])
