"""Decodes a batch of each size, and keeps the tokens, the logits' bits, and how long a replay takes."""

from __future__ import annotations

import hashlib
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.decoding import digest, digest_weights
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.vllm_check.starts import Start

TOKENS = 4  # of each sequence: one from the prompts' step, the others from decode steps
_PROMPT = 12  # less than a block, so that no batch finds the prefix of another in the cache
_SHOWN = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_HOST_SIZES = (1, 2, 4, 8)  # a start on the host has no graphs
_REPEATS = 11


def sizes(start: Start) -> list[int]:
    """The batch sizes that have a graph of their own, and so run without padding."""
    return sorted({batch.num_tokens for batch in full_graphs(start.runner)}) or list(_HOST_SIZES)


def full_graphs(runner: Any) -> dict[Any, Any]:
    """vLLM's full graphs by their description. It has none on a CPU."""
    manager = getattr(runner, "cudagraph_manager", None)
    graphs = getattr(manager, "graphs", {})
    return {batch: graph for batch, graph in graphs.items() if getattr(batch, "num_ubatches", 1) == 1}


def piecewise_graphs() -> list[Any]:
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    entries = [
        entry for wrapper in CUDAGraphWrapper._all_instances for entry in wrapper.concrete_cudagraph_entries.values()
    ]
    return [entry.cudagraph for entry in entries if entry.cudagraph is not None]


def batches(start: Start, machine: Machine) -> dict[str, Any]:
    """Return for each size the tokens' digest, and the logits' for each step; then the seconds of replays."""
    found: dict[str, Any] = {}
    steps: dict[str, float] = {}
    vocabulary = start.runner.model_config.get_vocab_size()
    graphs = {batch.num_tokens: graph for batch, graph in full_graphs(start.runner).items()}
    with recorded_logits(start, max(sizes(start))) as logits:
        start.decode(prompts(1, vocabulary), TOKENS)  # what a process does once
        for size in sizes(start):
            logits.clear()
            tokens = start.decode(prompts(size, vocabulary), TOKENS)
            text = hashlib.sha256(str(tokens).encode()).hexdigest()[:16]
            found[str(size)] = {"tokens": text, "prompts": logits[:1], "decode": logits[1:]}
            if size in graphs and size in _SHOWN:
                times = start.in_engine(partial(machine.time_ms, graphs[size].replay, _REPEATS))
                steps[str(size)] = statistics.median(times)
        example = start.decode(prompts(2, vocabulary), 16)
    return {"batches": found, "steps": steps, "example": example}


def prompts(size: int, vocabulary: int) -> list[list[int]]:
    dice = random.Random(size)
    return [[dice.randrange(3, vocabulary) for _ in range(_PROMPT)] for _ in range(size)]


@contextmanager
def recorded_logits(start: Start, rows: int) -> Iterator[list[str]]:
    """The digests of all logits that the model computes in this context, of up to ``rows`` rows."""
    model, weights, found = start.runner.model, None, []
    compute = model.compute_logits

    def recorded(*arguments: Any, **options: Any) -> Any:
        nonlocal weights
        logits: Tensor | None = compute(*arguments, **options)
        if logits is not None:
            if weights is None:
                weights = digest_weights(rows * logits.shape[-1], logits.device)
            found.append(digest(logits, weights))
        return logits

    model.compute_logits = recorded
    try:
        yield found
    finally:
        del model.compute_logits


def counted(start: Start) -> dict[str, int]:
    """Return how many graphs there are of each kind, and how many of them vLLM has captured itself."""
    full, piecewise = list(full_graphs(start.runner).values()), piecewise_graphs()
    captured = [graph for graph in (*full, *piecewise) if isinstance(graph, torch.cuda.CUDAGraph)]
    return {"full": len(full), "piecewise": len(piecewise), "captured": len(captured)}


def attention(runner: Any) -> list[str]:
    """The names of the attention backends that vLLM has chosen."""
    groups: Sequence[Sequence[Any]] = getattr(runner, "attn_groups", [])
    return sorted({group.backend.get_name() for each in groups for group in each})
