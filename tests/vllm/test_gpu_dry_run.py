"""Run 5 of the check of a GPU, without one: vLLM on the CPU, and its graphs on the fake driver."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from benchmarks.gpu import run
from benchmarks.gpu.probe import environ

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_a_dry_run_goes_through_all_parts_of_run_5(tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["--dry-run", "--run", "5", "--out", str(out), "--work", str(tmp_path / "work")]
    assert run.main(arguments) == 0
    results = json.loads((out / "results.json").read_text())
    assert list(results) == [
        "vllm",
        *(f"tiny-qwen3 vllm {part}" for part in ("bundle", "restored", "captured", "cold", "stock")),
    ]
    ours, stock = results["tiny-qwen3 vllm captured"], results["tiny-qwen3 vllm stock"]
    assert list(ours["batches"]) == ["1", "2", "4", "8"]
    assert ours["batches"] == stock["batches"]
    assert len({digest for batch in ours["batches"].values() for digest in batch["decode"]}) == 12
    assert {len(tokens) for tokens in ours["example"]} == {16}
    assert {"device", "load", "apply", "kv_cache"} <= set(ours["stages"])
    assert results["tiny-qwen3 vllm bundle"]["kept"] == {"full": 3, "piecewise": 4}
    assert results["tiny-qwen3 vllm restored"]["same"]
    summary = (out / "summary.txt").read_text()
    assert "ok    tiny-qwen3: vLLM: 4 sizes, vLLM's own worker: sizes that differ: none" in summary
    assert "ok    tiny-qwen3: vLLM: graphs kept: 3 full and 4 piecewise; refused: none" in summary
    assert "----  tiny-qwen3: vLLM: restoring against its own capture: not measured" in summary
    with tarfile.open(out / "run-5.tar.gz") as tar:
        assert {"results.json", "summary.txt", "tiny-qwen3.vllm.graphs", "vllm.log"} <= set(tar.getnames())
    # Ours again, with one weight that is wrong in its last bit. Parts whose results are kept do not run again.
    del results["tiny-qwen3 vllm captured"]
    (out / "results.json").write_text(json.dumps(results))
    flip_last_bit(tmp_path / "work" / "tiny-qwen3" / "model.safetensors", "model.norm.weight")
    run.main(arguments)
    summary = (out / "summary.txt").read_text()
    assert "MISS  tiny-qwen3: vLLM: 4 sizes, vLLM's own worker: sizes that differ: 1, 2, 4, 8" in summary


def flip_last_bit(file: Path, name: str) -> None:
    """Change the first number of a tensor by as little as its dtype allows."""
    data = bytearray(file.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    data[start + json.loads(data[8:start])[name]["data_offsets"][0]] ^= 1
    file.write_bytes(data)


_BUNDLE = """
import sys, threading, time
from dataclasses import replace
from pathlib import Path
from benchmarks.gpu.vllm_check import materialization, starts

def capture(model, settings, folder):
    (folder / "cuda-graphs").write_bytes(b"some graphs")
    (folder / "second.dump").write_bytes(b"a dump")
    return folder / "cuda-graphs"

materialization.graph_capture.capture = capture
materialization.counts = lambda data: {"graphs": data}
model, folder = sys.argv[1:]
settings = starts.settings_for(model, "never", dry_run=True)
print(materialization.materialized(settings, Path(folder))["artifacts"])
materialization.graphs_of(Path(folder)).unlink()
materialization.materialize = lambda settings, folder: 1.0  # the command has left the same bundle
print(materialization.materialized_by_command(settings, Path(folder))["graphs"])
with starts.our_start(replace(settings, graphs="restore", state=folder)) as one:
    one.decode([[3, 4]], 1)
    time.sleep(1)  # idle
    print([thread.name for thread in threading.enumerate() if thread.name.startswith("vllm-")])
    print(one._engine._region.code(".medusa/cuda-graphs"))
"""


def test_a_start_that_restores_gets_the_graphs_of_the_bundle(tmp_path: Path) -> None:
    model = run.make_checkpoint(tmp_path, "tiny-qwen3", 100)
    command = [sys.executable, "-c", _BUNDLE, str(model), str(tmp_path / "small-0.5b.vllm")]
    done = subprocess.run(command, cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == "b'some graphs'", done.stdout
    assert done.stdout.splitlines()[-2] == "[]", "vLLM's server is mounted beside what is measured"
    assert done.stdout.splitlines()[1] == "b'some graphs'", "of the bundle's artifacts"
    assert "compile-cache" not in done.stdout, "an eager model needs no compiled code"
    assert (tmp_path / "small-0.5b.vllm.graphs").read_bytes() == b"some graphs"
    assert (tmp_path / "small-0.5b.vllm.second.dump.graphs").read_bytes() == b"a dump"
