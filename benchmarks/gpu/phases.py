"""The loading phase by three strategies, as in MEDUSA's figures 7 and 8, each in a process of its own.

- ``capture``: weights, then a profiling forward for the KV cache's size, then warm-up and capture; nothing overlaps.
- ``async``: the same, but weights come while the forward and the captures run (they need addresses, not values).
- ``medusa``: planned KV cache; graphs are built while weights come, as in the engine, and checked when these are there.

The loading phase starts when Python and the context are there, and ends when graphs and weights are.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import torch
from medusa_runtime.config import Settings
from medusa_runtime.engine.base import Delta, GenerateRequest, SamplingParams
from medusa_runtime.engine.gpu.attention import DecodeAttention
from medusa_runtime.load.gate import bypass_gates

from benchmarks.gpu.decoding import capture_all
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.started import Started, started

STRATEGIES = ("capture", "async", "medusa")


def phase(machine: Machine, settings: Settings, strategy: str, bundle: Path | None) -> dict[str, Any]:
    begin_ns = time.monotonic_ns()
    with started(machine, settings, wait=strategy == "capture") as one:
        if strategy == "medusa":
            assert bundle is not None
            one.engine._loader.wait_placed()
            with one.timeline.stage("prepare_graphs"):
                restorer = one.gpu.restorer(one.runner.model, one.graphs)
                restorer.begin(bundle.read_bytes())
                restorer.build(one.graphs.sizes)
            one.engine.wait_ready()
            with one.timeline.stage("restore_graphs"):
                one.graphs.adopt(restorer.restore_sizes(one.graphs.sizes, validate="ends"))
                machine.synchronize()
        else:
            one.engine._loader.wait_placed()
            with one.timeline.stage("profile"):
                profile(one, settings)
                machine.synchronize()
            capture_all(one)
        one.engine.wait_ready()
        machine.synchronize()
        end_ns = time.monotonic_ns()
        one.timeline.mark("ready")
        token_ns = first_token(one) - begin_ns
        stages = [stage._asdict() for stage in one.timeline.stages()]
        graphs = len(one.graphs.graphs)
    return {
        "strategy": strategy,
        "loading_s": (end_ns - begin_ns) / 1e9,
        "first_token_s": token_ns / 1e9,
        "graphs": graphs,
        "stages": stages,
    }


def profile(one: Started, settings: Settings) -> None:
    """Run the largest possible forward, which the recorded plan (MEDUSA §6) makes unnecessary."""
    cache, graphs, device = one.engine.runner.cache, one.graphs, one.gpu.device  # type: ignore[attr-defined]
    tokens = min(settings.max_batched_tokens, settings.max_concurrency * 8)
    places = torch.zeros(tokens, dtype=torch.long, device=device)
    slots = torch.full((tokens,), cache.spare * 16, device=device)
    tables = torch.full((tokens, 1), cache.spare, dtype=torch.int32, device=device)
    attention = DecodeAttention(cache, slots, places + 1, tables)
    model = one.runner.model
    with bypass_gates(), torch.inference_mode():
        hidden = model.run_layers(model.embed(places, places), places, attention)
        model.logits(hidden[: graphs.sizes[-1]])


def first_token(one: Started) -> int:
    """The time of a request's first token, from an engine that starts to run now."""
    stop, came = threading.Event(), threading.Event()
    at: list[int] = []

    def sink(delta: Delta) -> None:
        if delta.token_ids and not at:
            at.append(time.monotonic_ns())
        if delta.finish_reason is not None:
            came.set()

    thread = threading.Thread(target=one.engine.run, args=(stop,), daemon=True)
    thread.start()
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    one.engine.add(GenerateRequest("first", tuple(range(3, 19)), params), sink)
    if not came.wait(120):
        raise TimeoutError("no token came within 120 s")
    stop.set()
    thread.join()
    return at[0]
