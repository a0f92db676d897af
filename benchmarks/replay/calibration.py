"""Calibrate the simulator with a system's stage times, from starts and single requests outside the replays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from statistics import median

from medusa_adapters.bench.openai_client import Completion, stream
from medusa_adapters.bench.served_instance import ServedInstance
from medusa_cluster.simulation.profiles import Speed, Stages
from medusa_cluster.simulation.trace import Request
from medusa_runtime.errors import StateError
from medusa_runtime.state.stage_times import summarize
from medusa_runtime.timeline import Stage

from benchmarks.replay.systems import System, body

PROMPT = 16  # tokens of a start's request
_DECODED = 24
_PAUSE_S = 0.1  # before each request that is timed: a process that has slept answers later


@dataclass
class Samples:
    """Measured seconds: of starts, of prefills by tokens, of decode steps by sequences, and of ends."""

    start: list[tuple[float, tuple[Stage, ...]]] = field(default_factory=list)  # to the first token
    prefill: list[tuple[int, float]] = field(default_factory=list)
    decode: list[tuple[int, float]] = field(default_factory=list)
    end: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Calibration:
    """The simulator's constants for a system on this machine; ``recorded``: medians of the stages behind them."""

    stages: Stages
    speed: Speed
    recorded: dict[str, float]


def fill_caches(system: System) -> None:
    """Start an instance once, so that later starts find what it leaves."""
    system.settle()
    with system.start() as instance:
        _ask(instance, system, Request(0.0, 0, PROMPT, 2))


def sample(system: System, context: int, found: Samples) -> None:
    """Start an instance, time its first token, then prefills and decodes when it is warm, and its end."""
    system.settle()
    instance = system.start()
    with instance:
        with closing(instance.connect()) as connection:
            first = stream(connection, body(Request(0.0, 0, PROMPT, 2), system.model))
        taken = (first.first_token_ns - instance.started_ns) / 1e9
        found.start.append((taken, instance.stages() if not system.model and system.concurrency > 1 else ()))
        probe(lambda request: _ask(instance, system, request), context, system.concurrency, found)
        ending = time.monotonic()
    found.end.append(time.monotonic() - ending)


def probe(ask: Callable[[Request], Completion], context: int, concurrency: int, found: Samples) -> None:
    """Time prefills, and decodes of several sequences at a time, on an instance that is warm."""
    for number, tokens in enumerate((PROMPT, context // 8, context // 2 - 1) * 3, 1):
        time.sleep(_PAUSE_S)
        began = time.monotonic_ns()
        completion = ask(Request(float(number), 0, tokens, 1))
        found.prefill.append((tokens, (completion.first_token_ns - began) / 1e9))
    for sequences in (1, 4, 8) if concurrency > 1 else (1,):
        time.sleep(_PAUSE_S)
        asked = [Request(100.0 * sequences + number, 0, PROMPT, _DECODED) for number in range(sequences)]
        with ThreadPoolExecutor(sequences) as pool:
            for completion in pool.map(ask, asked):
                step = (completion.end_ns - completion.first_token_ns) / 1e9 / (_DECODED - 1)
                found.decode.append((sequences, step))


def _ask(instance: ServedInstance, system: System, request: Request) -> Completion:
    with closing(instance.connect()) as connection:
        return stream(connection, body(request, system.model))


def calibrate(found: Samples) -> Calibration:
    """Fit lines through prefills and decodes, and divide a start into its recorded stages."""
    speed = Speed(*_line(found.prefill), *_line(found.decode))
    total = median(taken for taken, _ in found.start)
    rest = max(total - speed.prefill(PROMPT), 0.0)
    end = median(found.end)
    recorded: dict[str, float] = {}
    container = device = imports = 0.0
    timelines = [stages for _, stages in found.start if stages]
    try:
        times = summarize(timelines, [speed.decode(1)]) if timelines else None
    except StateError:  # a start that took its engine from an agent forked no zygote
        times = None
    if times is not None:
        recorded = times.stages
        container, device = times.container_s, times.device_s
        imports = min(times.import_s, max(rest - container - device, 0.0))
    init = max(rest - container - device - imports, 0.0)
    stages = Stages(container, device, imports, 1e15, init, 0.0, 0.0, 0.0, 0.0, 0.0, end_s=end)
    return Calibration(stages, speed, recorded)


def _line(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit the medians of each size by least squares; neither number is below 0."""
    sizes = sorted({size for size, _ in samples})
    points = [(size, median(taken for other, taken in samples if other == size)) for size in sizes]
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = max(sum((x - mean_x) * (y - mean_y) for x, y in points) / spread, 0.0) if spread else 0.0
    return max(mean_y - slope * mean_x, 0.0), slope
