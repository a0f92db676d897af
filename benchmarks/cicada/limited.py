"""Cold inferences from an origin with limited bandwidth, and from one that delays single ranges."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from medusa_adapters.bench.result import Result
from medusa_runtime.errors import CorruptError

from benchmarks.cicada.origin import serving
from benchmarks.cicada.runner import Container, Inference
from benchmarks.cicada.sample import Request

RATE_BYTES_PER_S = 100e6
_START_S = 5.0  # of a container and an origin, before they are asked
# name, every how many large ranges one is late, and by how many seconds
_ORIGINS = (("limited", 0, 0.0), ("delayed", 8, 0.5))


def measure_limited(
    result: Result,
    model: str,
    checkpoints: Path,
    runs: int,
    scratch: Path,
    *,
    strategies: Sequence[str] = ("full",),
) -> None:
    """Adds rows ``<model>/limited`` and ``<model>/delayed`` (ours), each also with ``-bound``.

    The bound is what no loader can beat: the bytes over the bandwidth, and then the last layer, whose time is taken
    from the sample itself. With the strategy ``sequential`` also ``-sequential``: download, load, and run.
    """
    size_bytes = _size_bytes(model, checkpoints)
    for name, every, delay_s in _ORIGINS:
        seconds: dict[str, list[float]] = defaultdict(list)
        digests = set()
        for strategy in tuple(strategies) * runs:
            origin = serving(checkpoints, RATE_BYTES_PER_S, every, delay_s)
            with origin as url, Container(scratch, strategy) as container:
                container.wait_ready()
                found = container.infer(Request(model, strategy, f"{url}/{model}"))
            for file in scratch.iterdir():  # what load-then-run has downloaded
                file.unlink()
            digests.add((strategy, found.digest))
            row = f"{model}/{name}" + ("" if strategy == "full" else "-sequential")
            seconds[row].append(found.seconds)
            if strategy == "full":
                seconds[f"{model}/{name}-bound"].append(size_bytes / RATE_BYTES_PER_S + _last_layer_s(found))
            print(f"  {row}: {found.seconds:.3f} s", file=sys.stderr, flush=True)
        if len(digests) > len(strategies):
            raise CorruptError(f"{model}/{name}: the same inference gave several outputs")
        for row, samples in seconds.items():
            result.add(row, "latency_s", "s", samples)


def seconds_needed(model: str, checkpoints: Path, runs: int) -> float:
    """Estimate how long ``measure_limited`` takes."""
    return len(_ORIGINS) * runs * (_size_bytes(model, checkpoints) / RATE_BYTES_PER_S + _START_S)


def _size_bytes(model: str, checkpoints: Path) -> int:
    return (checkpoints / model / "model.safetensors").stat().st_size


def _last_layer_s(found: Inference) -> float:
    last = max((stage for stage in found.stages if stage.name == "execute"), key=lambda stage: stage.end)
    waits = [(s.start, s.end) for s in found.stages if s.name == "wait" and s.end > last.start]
    return last.end - max([last.start, *(end for _, end in waits)])
