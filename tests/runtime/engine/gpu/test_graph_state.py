"""The torch engine's decode graphs, taken from one process into another, on the fake driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
GRAPHS = HERE.parents[1] / "state/graphs"
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(fake_cuda: Path) -> Run:
    def run(phase: str, where: int, **options: Any) -> dict[str, Any]:
        variables = {**os.environ, "FAKE_CUDA_LIBRARY": str(fake_cuda), "TOY_CUBINS": str(GRAPHS / "cubins")}
        variables |= {"FAKE_CUDA_BASE": hex(where), "FAKE_CUDA_ORDER": str(int(phase == "dump"))}
        variables["FAKE_CUDA_SHIFTS"] = "2" if phase == "dump" else "0"  # as large as the workspace, and before it
        command = [sys.executable, str(HERE / "graphs_on_fake.py"), phase, json.dumps(options)]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=250)
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
    assert len({digest for digests in made["answers"].values() for digest in digests}) == 6
    return {**made, "path": str(folder / "bundle")}


@pytest.mark.timeout(600)
def test_restored_elsewhere_without_running_a_layer(run: Run, bundle: dict[str, Any]) -> None:
    restored = run("restore", 0x580000000000, bundle=bundle["path"], base=0x480000000000)
    assert restored["reasons"] == {}
    assert restored["answers"] == bundle["answers"]
    assert restored["layers"] == []


@pytest.mark.timeout(600)
def test_a_third_process_leaves_out_what_does_not_give_its_outputs(run: Run, bundle: dict[str, Any]) -> None:
    """Offline, before any user: with a graph whose stored outputs are others."""
    checked = run("check", 0x580000000000, bundle=bundle["path"], broken="decode 2")
    assert checked["kept"] == ["decode 4", "decode 1"]
    assert checked["refused"] == {"decode 2": "output: a replay of decode 2 did not give its stored outputs"}


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
    assert "3 graphs only fit where they were captured: gemv has an address of unknown form" in made["log"]
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
