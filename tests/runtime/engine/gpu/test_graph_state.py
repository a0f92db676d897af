"""The torch engine's decode graphs, taken from one process into another, on the fake driver."""

from __future__ import annotations

import json
import logging
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from medusa_runtime.config import Settings
from medusa_runtime.engine.gpu import graph_capture
from medusa_runtime.engine.gpu.graph_pool import POOL_BASE
from medusa_runtime.state.graphs import Blueprints
from medusa_runtime.state.graphs.blob_format import decode_blueprints, save_blueprints
from medusa_runtime.state.graphs.blueprint import GraphBlueprint

HERE = Path(__file__).parent
GRAPHS = HERE.parents[1] / "state/graphs"
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def forks() -> Iterator[ForkServer]:
    server = ForkServer("graphs_on_fake", folders=[HERE])
    yield server
    server.close()


@pytest.fixture(scope="module")
def run(fake_cuda: Path, forks: ForkServer) -> Run:
    """Run one phase in a process of its own, forked from one that has imported all; what is materialized, in a new one.

    So nothing that a bundle was made of is at the addresses of the other capture, or of those that restore it.
    """

    def run(phase: str, where: int, *, cc: str | None = None, **options: Any) -> dict[str, Any]:
        variables = {**os.environ, "FAKE_CUDA_LIBRARY": str(fake_cuda), "TOY_CUBINS": str(GRAPHS / "cubins")}
        variables |= {"CC": cc} if cc else {}
        variables |= {"FAKE_CUDA_LATE": "1", "FAKE_CUDA_BASE": hex(where), "FAKE_CUDA_ORDER": str(int(phase == "dump"))}
        variables["FAKE_CUDA_SHIFTS"] = "2" if phase == "dump" else "0"  # as large as the workspace, and before it
        arguments = [phase, json.dumps(options)]
        if phase == "materialize":
            command = [sys.executable, str(HERE / "graphs_on_fake.py"), *arguments]
            done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=250)
        else:
            done = forks.run("graphs_on_fake:command", arguments, environ=variables)
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return {**result, "log": done.stderr}

    return run


@pytest.fixture(scope="module")
def bundle(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bundle")
    run("dump", 0x510000000000, out=str(folder / "second"), blocks=3)
    made = run("materialize", 0x610000000000, out=str(folder / "bundle"), second=str(folder / "second"))
    assert made["refused"] == {}
    assert made["pinned"] == []
    pool = [name for name in made["names"] if name != "weights" and not name.startswith(("KV cache", "graph "))]
    assert pool == [], "the pool has all that has no name, and the workspace, too"
    assert "graph pool" in made["names"]
    assert made["contents"][0][0] == "graph pool", "what the workspace has to contain"
    assert len({digest for digests in made["answers"].values() for digest in digests}) == 6
    return {**made, "path": str(folder / "bundle")}


@pytest.mark.timeout(600)
def test_restored_elsewhere_without_running_a_layer(run: Run, bundle: dict[str, Any]) -> None:
    restored = run("restore", 0x580000000000, bundle=bundle["path"], base=0x480000000000)
    assert restored["reasons"] == {}
    assert restored["answers"] == bundle["answers"]
    assert restored["layers"] == []


@pytest.mark.timeout(600)
def test_a_taken_address_of_the_pool(run: Run, bundle: dict[str, Any]) -> None:
    """Graphs are relocated, word by word, and one line says so."""
    restored = run("restore", 0x580000000000, bundle=bundle["path"], take=[POOL_BASE])
    assert restored["reasons"] == {}
    assert restored["answers"] == bundle["answers"]
    assert restored["log"].count(" is taken: ") == 1
    assert f"{POOL_BASE:#x} is taken: graph pool is at 0x58" in restored["log"]


@pytest.fixture(scope="module")
def stale(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A bundle of graphs with an old address in their parameters: in the pool, and elsewhere in each process."""
    folder = tmp_path_factory.mktemp("stale")
    run("dump", 0x510000000000, out=str(folder / "second"), blocks=3, stale=4096)
    made = run("materialize", 0x610000000000, out=str(folder / "bundle"), second=str(folder / "second"), stale=72)
    return {**made, "path": str(folder / "bundle"), "second": str(folder / "second")}


@pytest.mark.timeout(600)
def test_an_old_address_that_nothing_reads_is_found_to_be_one(
    run: Run, stale: dict[str, Any], bundle: dict[str, Any], tmp_path: Path
) -> None:
    """A third process runs each graph with the second capture's bytes. Then it can be restored anywhere."""
    freed = str(tmp_path / "bundle")
    checked = run("check", 0x580000000000, bundle=stale["path"], second=stale["second"], out=freed)
    assert checked["refused"] == {}
    assert "3 of 3 pinned graphs can be at other addresses, too" in checked["log"]
    restored = run("restore", 0x590000000000, bundle=freed, take=[POOL_BASE], base=0x480000000000, blocks=4)
    assert restored["reasons"] == {}
    assert restored["answers"] == bundle["answers"]


@pytest.mark.timeout(600)
def test_a_word_that_matters_keeps_its_graph_where_it_was(run: Run, stale: dict[str, Any], tmp_path: Path) -> None:
    second, same = decode_blueprints(Path(stale["second"]).read_bytes()), str(tmp_path / "bundle")
    factor = [struct.pack("<if", 16, factor) for factor in (0.5, 0.25)]  # of the kernel ``scale``, behind its count
    assert all(factor[0] in graph.blob for graph in second.graphs)
    same_factor = second.graph("decode 2")
    others = (replace(one, blob=one.blob.replace(*factor, 1)) for one in second.graphs if one is not same_factor)
    save_blueprints(replace(second, graphs=(*others, same_factor)), tmp_path / "second")
    checked = run("check", 0x580000000000, bundle=stale["path"], second=str(tmp_path / "second"), out=same)
    assert "1 of 3 pinned graphs can be at other addresses, too" in checked["log"]
    restored = run("restore", 0x590000000000, bundle=same, take=[POOL_BASE])
    assert list(restored["answers"]) == ["2"]
    assert set(restored["reasons"]) == {"decode 1", "decode 4"}


@pytest.mark.timeout(600)
def test_an_old_address_in_the_pool_refuses_no_graph(run: Run, stale: dict[str, Any], bundle: dict[str, Any]) -> None:
    assert stale["refused"] == {}
    assert "3 graphs only fit where they were captured: gemv has a word that" in stale["log"]
    assert "graph pool" in stale["pinned"]
    assert not [name for name in stale["pinned"] if name.startswith("workspace")], "nobody points to torch's others"
    checked = run("check", 0x580000000000, bundle=stale["path"])
    assert checked["refused"] == {}
    restored = run("restore", 0x590000000000, bundle=stale["path"])
    assert restored["reasons"] == {}
    assert restored["answers"] == stale["answers"] == bundle["answers"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("elsewhere", "name"), [({"take": [POOL_BASE]}, "graph pool"), ({"base": 0x480000000000}, "weights")]
)
def test_what_is_not_explained_is_not_relocated(
    run: Run, stale: dict[str, Any], elsewhere: dict[str, Any], name: str
) -> None:
    restored = run("restore", 0x580000000000, bundle=stale["path"], **elsewhere)
    assert restored["answers"] == {}
    (reason,) = set(restored["reasons"].values())
    assert reason.startswith(f"address: expected {name} at 0x6")


@pytest.mark.timeout(600)
def test_without_a_compiler_the_pool_is_torchs_own(run: Run, bundle: dict[str, Any], tmp_path: Path) -> None:
    """Its bundle has no such range, as bundles of earlier versions, and is relocated."""
    path, second = str(tmp_path / "bundle"), str(tmp_path / "second")
    run("dump", 0x510000000000, out=second, blocks=3, cc="false")
    made = run("materialize", 0x610000000000, out=path, second=second, cc="false")
    assert "captured in memory at addresses that torch chooses: graph_pool.c cannot be compiled" in made["log"]
    assert made["refused"] == {}
    assert "graph pool" not in made["names"]
    restored = run("restore", 0x580000000000, bundle=path, base=0x480000000000)
    assert restored["reasons"] == {}
    assert restored["answers"] == bundle["answers"]


@pytest.mark.timeout(600)
def test_a_third_process_leaves_out_what_does_not_give_its_outputs(run: Run, bundle: dict[str, Any]) -> None:
    """Offline, before any user: with a graph whose stored outputs are others."""
    checked = run("check", 0x580000000000, bundle=bundle["path"], broken="decode 2")
    assert checked["kept"] == ["decode 4", "decode 1"]
    assert checked["refused"] == {"decode 2": "output: a replay of decode 2 did not give its stored outputs"}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"blocks": 6}, "address: captured with a KV cache of another size, which something in it may depend on"),
        ({"gpu": "Fake B200"}, "gpu: made for gpu Fake B200, this is Fake H200"),
        ({"full": True}, "memory: its memory could not be mapped in a new process; the log says why"),
    ],
)
def test_a_third_process_leaves_out_what_it_cannot_restore(
    run: Run, stale: dict[str, Any], options: dict[str, Any], reason: str
) -> None:
    checked = run("check", 0x580000000000, bundle=stale["path"], **options)
    assert checked["kept"] == []
    assert checked["refused"] == dict.fromkeys(["decode 4", "decode 2", "decode 1"], reason)


@pytest.fixture
def capture(
    fake_cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[[Blueprints, Blueprints], Blueprints]:
    """A function that takes the results of two processes that have captured, and lets others check them."""

    def capture(unchecked: Blueprints, second: Blueprints) -> Blueprints:
        made = {"made": unchecked, "dump": second}
        for name, blueprints in made.items():
            save_blueprints(blueprints, tmp_path / name)
        options = {"bundle": "$4", "out": "$3", "attempts": f"{tmp_path}/attempts", "second": f"{tmp_path}/second.dump"}
        quoted = json.dumps(options).replace('"', '\\"')
        script = f"""#!/bin/sh
[ "$5" ] || {{ cp {tmp_path}/$([ "$4" ] && echo made || echo dump) "$3"; exit 0; }}
exec {sys.prefix}/bin/python {HERE}/graphs_on_fake.py check "{quoted}"
"""
        (tmp_path / "python").write_text(script)
        (tmp_path / "python").chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        monkeypatch.setattr("medusa_runtime.device.choice.choose", lambda device, environ: "cuda")
        variables = {
            "FAKE_CUDA_LIBRARY": fake_cuda,
            "TOY_CUBINS": GRAPHS / "cubins",
            "FAKE_CUDA_BASE": "0x580000000000",
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        with caplog.at_level(logging.INFO):
            out = graph_capture.capture("m", Settings(), tmp_path)
        assert out is not None
        return decode_blueprints(out.read_bytes())

    return capture


def astray(graph: GraphBlueprint) -> GraphBlueprint:
    """Let its first kernel read where there is nothing."""
    first, *others = graph.relocations
    blob = bytearray(graph.blob)
    blob[first.position : first.position + 8] = (0x1000).to_bytes(8, "little")
    return replace(graph, blob=bytes(blob), relocations=tuple(others))


@pytest.mark.timeout(600)
def test_of_graphs_that_break_the_context_only_these_are_left_out(
    capture: Callable[..., Blueprints], bundle: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Each one ends a process, and the next one goes on without it."""
    made, wrong = decode_blueprints(Path(bundle["path"]).read_bytes()), ("decode 1", "decode 4")
    graphs = (astray(graph) if graph.key in wrong else graph for graph in made.graphs)
    checked = capture(replace(made, graphs=tuple(graphs)), made)
    assert [graph.key for graph in checked.graphs] == ["decode 2"]
    why = "output: the process that checked it broke its CUDA context, or did not end"
    assert checked.refused == dict.fromkeys(wrong, why)
    for key in wrong:
        assert f"another process goes on without {key}, which ended this one: checking the" in caplog.text
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 2


@pytest.mark.timeout(600)
def test_of_pinned_graphs_whose_words_break_the_context_only_these_stay_pinned(
    capture: Callable[..., Blueprints], stale: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """With the second capture's bytes, a kernel runs past the end of its memory."""
    second = decode_blueprints(Path(stale["second"]).read_bytes())
    count = [struct.pack("<if", count, 0.5) for count in (16, 1 << 28)]  # of the kernel ``scale``
    others = (replace(one, blob=one.blob.replace(*count, 1)) if one.key == "decode 2" else one for one in second.graphs)
    unchecked = decode_blueprints(Path(stale["path"]).read_bytes())
    checked = capture(unchecked, replace(second, graphs=tuple(others)))
    assert "another process goes on without decode 2, which ended this one: " in caplog.text
    assert checked.refused == {}
    assert {graph.key for graph in checked.graphs if graph.pinned} == {"decode 2"}


@pytest.mark.timeout(600)
def test_a_full_device_ends_a_start_with_one_line_or_leaves_graphs_out(run: Run, bundle: dict[str, Any]) -> None:
    """Each allocation of a start is refused in turn, those in threads as well. Nothing stays allocated."""
    found = run("full", 0x580000000000, bundle=bundle["path"])
    starts = found["starts"]
    assert len(starts) > 20
    for start in starts[:-1]:
        assert start["left"] == 0, start
        if "error" in start:
            assert re.match(
                r"(the [a-zA-Z ]+ cannot be placed: memory: )?cu\w+ failed: .*OUT_OF_MEMORY", start["error"]
            )
            assert "\n" not in start["error"]
        else:
            assert start["answers"].items() <= bundle["answers"].items(), "of the graphs that are left"
            assert len(start["answers"]) == 3 or start["reasons"] or " not restored: memory: " in found["log"], start
    errors = [start["error"].partition(" cannot be placed")[0] for start in starts if "error" in start]
    assert {"the weights", "the KV cache", "the graph inputs", "the graph outputs"} <= set(errors)
    assert {len(start["answers"]) for start in starts if "answers" in start} >= {0, 3}
    assert starts[-1] == {"answers": bundle["answers"], "reasons": [], "refused": False, "left": 0}


@pytest.mark.timeout(600)
def test_kernels_without_an_image_are_found_by_capturing_the_first_layer(run: Run, bundle: dict[str, Any]) -> None:
    """MEDUSA §5.2 in the engine: it warms up and captures one layer, once, because its modules have all kernels."""
    restored = run("restore", 0x580000000000, bundle=bundle["path"], without_images=True)
    assert restored["reasons"] == {}
    assert restored["answers"] == bundle["answers"]
    assert restored["layers"] == [1, 1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_kernel_that_the_first_layer_does_not_have(run: Run, bundle: dict[str, Any], tmp_path: Path) -> None:
    path = str(tmp_path / "bundle")
    made = run("materialize", 0x610000000000, out=path, odd=True)
    assert made["refused"] == {}
    restored = run("restore", 0x580000000000, bundle=path, odd=True, without_images=True)
    assert restored["answers"] == {}
    reason = "kernel-missing: scale is another kernel here"
    assert set(restored["reasons"].values()) == {reason}, "the first layer has one of that name and those parameters"
    assert restored["log"].count("captured, not restored") == 1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("blocks", [4, *(pytest.param(many, marks=pytest.mark.slow) for many in (9, 40_000))])
def test_a_kv_cache_of_another_size(run: Run, bundle: dict[str, Any], blocks: int) -> None:
    """Two captures have shown that these graphs know only where each layer's keys and values begin."""
    restored = run("restore", 0x580000000000, bundle=bundle["path"], blocks=blocks)
    assert restored["reasons"] == {}
    assert restored["answers"] == bundle["answers"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kernels_that_are_told_how_large_the_kv_cache_is(run: Run, tmp_path: Path) -> None:
    bundle = str(tmp_path / "bundle")
    run("dump", 0x510000000000, out=str(tmp_path / "second"), blocks=3, told=1)
    made = run("materialize", 0x610000000000, out=bundle, second=str(tmp_path / "second"), told=1)
    assert made["refused"] == {}
    assert "3 graphs only fit where they were captured: gemv has a word that two captures do not explain" in made["log"]
    restored = run("restore", 0x610000000000, bundle=bundle, blocks=6, told=1)
    assert restored["answers"] == {}
    assert set(restored["reasons"].values()) == {
        "address: captured with a KV cache of another size, which something in it may depend on"
    }


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_size_that_was_not_tried_is_not_taken(run: Run, tmp_path: Path) -> None:
    """Both captures had the same number of blocks, so what depends on it was not seen."""
    bundle = str(tmp_path / "bundle")
    run("dump", 0x510000000000, out=str(tmp_path / "second"))
    made = run("materialize", 0x610000000000, out=bundle, second=str(tmp_path / "second"))
    assert run("restore", 0x580000000000, bundle=bundle)["answers"] == made["answers"]
    restored = run("restore", 0x580000000000, bundle=bundle, blocks=6)
    assert set(restored["reasons"].values()) == {"library: made for kv blocks 21, this is 22"}


@pytest.mark.timeout(600)
def test_a_start_on_another_gpu_says_so_and_maps_nothing(run: Run, bundle: dict[str, Any], tmp_path: Path) -> None:
    other, reason = tmp_path / "bundle", "gpu: made for gpu Fake B200, this is Fake H200"
    made = decode_blueprints(Path(bundle["path"]).read_bytes())
    save_blueprints(replace(made, fingerprint={**made.fingerprint, "gpu": "Fake B200"}), other)
    restored = run("restore", 0x580000000000, bundle=str(other), begun=True)
    assert restored == {"sizes": [], "images": 0, "mapped": [], "log": restored["log"]}
    assert restored["log"].count(f"3 CUDA graphs are captured, not restored: {reason}") == 1
    restored = run("restore", 0x580000000000, bundle=bundle["path"], begun=True)
    assert restored == {
        "sizes": [1, 2, 4],
        "images": len(made.images),
        "mapped": ["graph pool"],
        "log": restored["log"],
    }
    assert "not restored" not in restored["log"]
