"""The lean import of torch in the engine of a GPU: the same bits as with a plain import, and nothing executed later."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.probe import environ
from benchmarks.gpu.run import make_checkpoint

# Starts an engine as the zygote does, with the context first, and captures its graphs; prints what came out.
ENGINE = """
import json, sys, threading
from dataclasses import replace
from medusa_runtime.device.context import DeviceContext
how, where, model = sys.argv[1:]
context = DeviceContext() if where == "gpu" else None
if how == "lean":
    from medusa_runtime.imports.lazy_torch import import_torch
    import_torch(numpy=False)
import torch
if context is not None:
    context.wait()
from benchmarks.gpu.decoding import capture_all, hashes
from benchmarks.gpu.machine import machine
from benchmarks.gpu.started import settings_for, started
from medusa_runtime.engine.base import GenerateRequest, SamplingParams

here = machine(dry_run=where == "host")
settings = replace(settings_for(model, dry_run=True), device="cuda" if where == "gpu" else "cpu")
tokens, done, stop = {}, threading.Semaphore(0), threading.Event()

def collect(name):
    def sink(delta):
        tokens.setdefault(name, []).extend(delta.token_ids)
        if delta.finish_reason is not None:
            done.release()
    return sink

with started(here, settings) as one:
    graphs = capture_all(one)["graphs"]
    bits = hashes(here, one)
    thread = threading.Thread(target=one.engine.run, args=(stop,), daemon=True)
    thread.start()
    for name, temperature in [("greedy", 0.0), ("sampled", 0.8)]:
        params = SamplingParams(max_tokens=8, temperature=temperature, top_p=0.9, seed=3, ignore_eos=True)
        one.engine.add(GenerateRequest(name, tuple(range(3, 19)), params), collect(name))
        assert done.acquire(timeout=100)
    stop.set()
    thread.join()
print(json.dumps({"lazy": type(sys.modules["torch.fx"]).__name__, "graphs": graphs, "bits": bits, "tokens": tokens}))
"""


@pytest.mark.timeout(200)
@pytest.mark.parametrize("where", ["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_an_engine_computes_the_same(where: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if where == "gpu":
        request.getfixturevalue("cuda")
    model = str(make_checkpoint(tmp_path, "tiny-qwen3", 100))
    processes = {
        how: subprocess.Popen(
            [sys.executable, "-c", ENGINE, how, where, model],
            env=environ(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for how in ("lean", "plain")
    }
    found: dict[str, dict[str, Any]] = {}
    for how, process in processes.items():
        out, said = process.communicate(timeout=180)
        assert process.returncode == 0, said
        found[how] = json.loads(out.splitlines()[-1])
    assert {how: one.pop("lazy") for how, one in found.items()} == {"lean": "LazyModule", "plain": "module"}
    assert found["lean"] == found["plain"]
    assert found["lean"]["graphs"] == 4
    assert {name: len(tokens) for name, tokens in found["lean"]["tokens"].items()} == {"greedy": 8, "sampled": 8}
