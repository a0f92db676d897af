"""Measures decode steps, captured and launched by hand, and compares the bits of two processes' graphs."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from medusa_runtime.engine.torch.kv_cache import BLOCK_TOKENS
from torch import Tensor

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.started import Started

_CONTEXT = 512  # tokens of each sequence when steps are timed
_SEEDS = (1, 2, 3)
_REPLAYS = 2


def capture_all(one: Started) -> dict[str, Any]:
    """Warm up and capture every size. Returns the seconds of each part, from the timeline."""
    begin = time.perf_counter()
    while one.graphs.pending:
        one.graphs.capture_next()
    seconds = time.perf_counter() - begin
    stages = one.timeline.stages()
    parts = {
        name: sum(s.end_ns - s.start_ns for s in stages if s.name == name) / 1e9 for name in ("warm_up", "capture")
    }
    return {"seconds": seconds, "graphs": len(one.graphs.graphs), **parts}


def fill(one: Started, size: int, seed: int, context: int | None = None) -> None:
    """Fill inputs and a KV cache from the seed alone.

    Every sequence has ``context`` tokens, or, without it, a length of its own.
    """
    graphs, cache = one.graphs, one.engine.runner.cache  # type: ignore[attr-defined]
    inputs, width = graphs.inputs, graphs.inputs.tables.shape[1]
    dice = torch.Generator().manual_seed(seed)
    # Blocks are shared by sequences: attention only reads, and each writes to a last block of its own.
    blocks = cache.pool.shape[2]
    last = torch.arange(size) % blocks
    tables = torch.randint(blocks, (size, width), generator=dice)
    longest = width * BLOCK_TOKENS if context is None else context
    contexts = torch.randint(1, longest + 1, (size,), generator=dice)
    if context is not None:
        contexts = torch.full((size,), min(context, width * BLOCK_TOKENS))
    tables[torch.arange(size), (contexts - 1) // BLOCK_TOKENS] = last
    slots = last * BLOCK_TOKENS + (contexts - 1) % BLOCK_TOKENS
    ids = torch.randint(one.engine.info.vocab_size, (size,), generator=dice)
    inputs.numbers[:, :size] = torch.stack([ids, contexts - 1, slots, contexts]).to(inputs.numbers.device)
    inputs.tables[:size] = tables.to(torch.int32).to(inputs.tables.device)


def fill_cache(one: Started) -> None:
    """Fill the cache with the same bits in every process: one random block, written to all."""
    pool = one.engine.runner.cache.pool  # type: ignore[attr-defined]
    block = torch.randn(pool.shape[3:], generator=torch.Generator().manual_seed(0)).to(pool.dtype).to(pool.device)
    pool[:] = block
    scale = 1 + torch.arange(pool.shape[2], device=pool.device).remainder(7).to(pool.dtype) / 8
    pool *= scale[:, None, None, None]


def hashes(machine: Machine, one: Started) -> dict[str, list[str]]:
    """The digests of the logits of each size, for three inputs with two replays each."""
    found: dict[str, list[str]] = {}
    weights: Tensor | None = None
    for size, graph in sorted(one.graphs.graphs.items(), reverse=True):
        digests = []
        for seed in _SEEDS:
            for _ in range(_REPLAYS):
                fill_cache(one)
                fill(one, size, seed)
                one.graphs.inputs.logits.fill_(float("nan"))
                graph.replay()
                machine.synchronize()
                logits = one.graphs.inputs.logits[:size]
                assert not logits.isnan().any(), f"batch size {size}: a row was not written"
                if weights is None:
                    weights = digest_weights(logits.numel(), logits.device)
                digests.append(digest(logits, weights))
        found[str(size)] = digests
    return dict(reversed(found.items()))


def digest_weights(count: int, device: torch.device) -> Tensor:
    """Odd numbers of 64 bits, the same in every process."""
    return torch.randint(-(1 << 62), 1 << 62, (count,), generator=torch.Generator().manual_seed(7)).to(device) * 2 + 1


def digest(logits: Tensor, weights: Tensor) -> str:
    """A hash of the bits, computed on the device: gigabytes would take seconds on the host.

    It is a sum modulo 2^64 with random odd weights, so it shows every single difference, and nearly all others.
    """
    bits = logits.flatten().view(torch.int16 if logits.dtype.itemsize == 2 else torch.int32).to(torch.int64)
    return f"{int((bits * weights[: len(bits)]).sum().item()) & (1 << 64) - 1:016x}"


def steps(machine: Machine, one: Started, repeats: int = 11) -> dict[str, dict[str, float]]:
    """The median milliseconds of a step at 512 tokens of context, eager and replayed."""
    found: dict[str, dict[str, float]] = {}
    graphs = one.graphs
    shown = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 256) if size in graphs.graphs]
    fill_cache(one)
    with torch.inference_mode():
        for size in shown:
            fill(one, size, seed=size, context=_CONTEXT)
            eager = statistics.median(machine.time_ms(lambda size=size: graphs.run_eagerly(size), repeats))  # type: ignore[misc]
            replay = statistics.median(machine.time_ms(graphs.graphs[size].replay, repeats))
            found[str(size)] = {"eager_ms": eager, "replay_ms": replay, "speedup": eager / replay}
    return found


def against_eager(machine: Machine, one: Started) -> dict[str, float]:
    """The largest relative difference of each size between a replay's logits and the same step launched by hand."""
    worst = 0.0
    fill_cache(one)
    with torch.inference_mode():
        for size, graph in bundled_graphs(one):
            fill(one, size, seed=5)
            graph.replay()
            machine.synchronize()
            replayed = one.graphs.inputs.logits[:size].float().clone()
            fill(one, size, seed=5)
            one.graphs.run_eagerly(size)
            machine.synchronize()
            stepped = one.graphs.inputs.logits[:size].float()
            worst = max(worst, float((replayed - stepped).norm() / stepped.norm()))
    return {"worst_relative_difference": worst}


def bundled_graphs(one: Started) -> list[tuple[int, Any]]:
    return sorted(one.graphs.graphs.items())
