"""The dry run's graphs: vLLM's own graph manager with a toy model, on the tests' fake driver."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.probe import ROOT, environ, fake_driver
from benchmarks.gpu.vllm_check.materialization import counts, graphs_of

_SCRIPT = ROOT / "tests/vllm/vllm_graphs_on_fake.py"
_CUBINS = ROOT / "tests/runtime/state/graphs/cubins"
_LONGEST_S = 300.0


def materialized_on_fake(folder: Path) -> dict[str, Any]:
    """Materialize full and piecewise graphs into one file, whose name is the folder's with ``.graphs``."""
    began = time.monotonic()
    blob = graphs_of(folder)
    found = _run("materialize", 0x6100_0000_0000, {"out": str(blob), "pieces": True})
    _answers(blob).write_text(json.dumps(found))
    data = blob.read_bytes()
    return {"seconds": time.monotonic() - began, "bytes": len(data), **counts(data)}


def restored_on_fake(folder: Path) -> dict[str, Any]:
    """Restore these in a process in which memory lies elsewhere, and decode with them."""
    blob = graphs_of(folder)
    captured = json.loads(_answers(blob).read_text())
    began = time.monotonic()
    found = _run("restore", 0x5900_0000_0000, {"bundle": str(blob), "pieces": True})
    restored = [kind for kind in found["kinds"].values() if kind != "CUDAGraph"]
    same = found["answers"] == captured["answers"] and found["piecewise"] == captured["piecewise"]
    return {"seconds": time.monotonic() - began, "restored_on_fake": len(restored), "same": same}


def _answers(blob: Path) -> Path:
    return Path(f"{blob}.answers")


def _run(phase: str, base: int, options: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        driver = {
            "FAKE_CUDA_LIBRARY": fake_driver(Path(folder)),
            "TOY_CUBINS": str(_CUBINS),
            "FAKE_CUDA_BASE": hex(base),
        }
        done = subprocess.run(
            [sys.executable, str(_SCRIPT), phase, json.dumps({"one": options})],
            cwd=ROOT,
            env={**environ(), **driver},
            stdout=subprocess.PIPE,
            timeout=_LONGEST_S,
            check=True,
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])["one"]
    return found
