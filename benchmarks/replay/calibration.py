"""The calibration of the simulator with a system's times, which come from starts and requests outside the replays."""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from math import log
from statistics import median, stdev

from medusa_adapters.bench.openai_client import Completion, stream
from medusa_adapters.bench.served_instance import ServedInstance
from medusa_cluster.simulation.fleet import Fleet, Machine, Model
from medusa_cluster.simulation.profiles import Speed, Stages
from medusa_cluster.simulation.trace import Request
from medusa_runtime.errors import StateError
from medusa_runtime.state.stage_times import summarize
from medusa_runtime.timeline import Stage

from benchmarks.replay.systems import System, body

PROMPT = 16  # tokens of the prompt in a start's request
_STARTS = 2  # starts in a sample
_DECODED = 24
_BURSTS = (4, 8)  # prompts sent at the same time
_PAUSE_S = 0.3  # before each timed request, because a process that has slept answers later


@dataclass
class Samples:
    """Measured seconds.

    ``start`` has the time to the first token and the stages of each start. ``prefill`` has pairs of the tokens of all
    prompts and their time, ``decode`` pairs of the number of sequences and the time of a step, and ``end`` the times
    that instances took to end.
    """

    start: list[tuple[float, tuple[Stage, ...]]] = field(default_factory=list)
    prefill: list[tuple[int, float]] = field(default_factory=list)
    decode: list[tuple[int, float]] = field(default_factory=list)
    end: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SampledSpeed:
    """A speed whose prefills take what samples took: ``prefills`` has tokens and seconds, by ascending tokens.

    Times between two samples, and beyond the outermost ones, are on the line through the next two. One line for all
    does not fit a CPU, which computes a short prompt with fewer threads, and prompts together faster than one alone.
    """

    prefills: tuple[tuple[int, float], ...]
    decode_s: float
    decode_s_per_sequence: float

    def prefill(self, tokens: float) -> float:
        place = bisect([size for size, _ in self.prefills[1:-1]], tokens)
        (size, taken), (next_size, next_taken) = self.prefills[place : place + 2]
        return max(taken + (tokens - size) * (next_taken - taken) / (next_size - size), 0.0)

    def decode(self, batch: float) -> float:
        return self.decode_s + self.decode_s_per_sequence * batch


@dataclass(frozen=True)
class Calibration:
    """The simulator's constants for a system on this machine.

    ``recorded`` has the medians of the stages behind the constants, in seconds. ``start_spread`` is the standard
    deviation of the logarithms of start times. ``prefill_spread`` is the same for prefills, each divided by the median
    for its size.
    """

    stages: Stages
    speed: Speed
    recorded: dict[str, float]
    start_spread: float = 0.0
    prefill_spread: float = 0.0

    def fleet(self, name: str, machine: Machine, model: Model) -> Fleet:
        """Return a fleet that serves a model. Its starts and prefills vary as much as the sampled ones."""
        return Fleet(
            name,
            (machine,),
            (model,),
            hop_s=0.0,
            start_spread=self.start_spread,
            prefill_spread=self.prefill_spread,
        )


def fill_caches(system: System) -> None:
    """Start an instance once, so that later starts find the caches that it fills."""
    system.settle()
    with system.start() as instance:
        _ask(instance, system, Request(0.0, 0, PROMPT, 2))


def sample(system: System, context: int, found: Samples) -> None:
    """Start instances, and add the times of their starts and ends to ``found``. Probe the last one once it is warm."""
    for number in range(_STARTS):
        system.settle()
        instance = system.start()
        with instance:
            with closing(instance.connect()) as connection:
                first = stream(connection, body(Request(0.0, 0, PROMPT, 2), system.model))
            taken = (first.first_token_ns - instance.started_ns) / 1e9
            found.start.append((taken, instance.stages() if not system.model and system.concurrency > 1 else ()))
            if number == _STARTS - 1:
                probe(partial(_ask, instance, system), context, system.concurrency, found)
            ending = time.monotonic()
        found.end.append(time.monotonic() - ending)


def probe(ask: Callable[[Request], Completion], context: int, concurrency: int, found: Samples) -> None:
    """Time prefills, single and in bursts, and decode steps of several sequences, on a warm instance.

    As in a replay, a prompt's time begins when it is due, before this process wakes and gives it to a thread. The first
    prompt of a burst is prefilled alone. The others are prefilled together as soon as the first one has its token. If
    all came in time for the first prefill, the burst is ignored.
    """
    with ThreadPoolExecutor(1) as pool:
        for number, tokens in enumerate((PROMPT, context // 8, context // 2 - 1) * 3, 1):
            due_ns = time.monotonic_ns() + round(_PAUSE_S * 1e9)
            time.sleep(_PAUSE_S)
            completion = pool.submit(ask, Request(float(number), 0, tokens, 1)).result()
            found.prefill.append((tokens, (completion.first_token_ns - due_ns) / 1e9))
    for prompts in _BURSTS * 2 if concurrency > 1 else ():
        time.sleep(_PAUSE_S)
        each = context // 2 - 1
        asked = [Request(50.0 * prompts + number, 0, each, 1) for number in range(prompts)]
        with ThreadPoolExecutor(prompts) as pool:
            came = sorted(completion.first_token_ns for completion in pool.map(ask, asked))
        later_s = (came[-1] - came[0]) / 1e9
        if later_s > min(taken for size, taken in found.prefill if size == each):
            found.prefill.append(((prompts - 1) * each, later_s))
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
    """Fit the times of prefills and decode steps, and divide a start into its recorded stages."""
    usual = {size: median(taken for other, taken in found.prefill if other == size) for size, _ in found.prefill}
    speed = SampledSpeed(tuple(sorted(usual.items())), *_line(found.decode))
    starts = [taken for taken, _ in found.start]
    total = median(starts)
    rest = max(total - speed.prefill(PROMPT), 0.0)
    end = median(found.end)
    recorded: dict[str, float] = {}
    container = device = imports = 0.0
    timelines = [stages for _, stages in found.start if stages]
    try:
        times = summarize(timelines, [speed.decode(1)]) if timelines else None
    except StateError:  # a start whose engine came from a node agent has no zygote's stages
        times = None
    if times is not None:
        recorded = times.stages
        container, device = times.container_s, times.device_s
        imports = min(times.import_s, max(rest - container - device, 0.0))
    init = max(rest - container - device - imports, 0.0)
    stages = Stages(container, device, imports, 1e15, init, 0.0, 0.0, 0.0, 0.0, 0.0, end_s=end)
    prefill_spread = _spread([taken / usual[size] for size, taken in found.prefill])
    return Calibration(stages, speed, recorded, _spread(starts), prefill_spread)


def _spread(samples: Sequence[float]) -> float:
    return stdev(log(taken) for taken in samples) if len(samples) > 1 else 0.0


def _line(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Fit a line to the median of each size by least squares of relative deviations. Return its offset and its slope.

    Neither is below 0.
    """
    sizes = {size for size, _ in samples}
    points = [(size, median(taken for other, taken in samples if other == size)) for size in sizes]
    weights = [1 / max(y, 1e-9) ** 2 for _, y in points]
    mean_x = sum(weight * x for weight, (x, _) in zip(weights, points, strict=True)) / sum(weights)
    mean_y = sum(weight * y for weight, (_, y) in zip(weights, points, strict=True)) / sum(weights)
    spread = sum(weight * (x - mean_x) ** 2 for weight, (x, _) in zip(weights, points, strict=True))
    product = sum(weight * (x - mean_x) * (y - mean_y) for weight, (x, y) in zip(weights, points, strict=True))
    slope = max(product / spread, 0.0) if spread else 0.0
    return max(mean_y - slope * mean_x, 0.0), slope
