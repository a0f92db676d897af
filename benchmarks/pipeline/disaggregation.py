"""A burst on prefill and decode instances, with and without decode instances scaled in step (BlitzScale §5.4).

The policy is the product's. Hosts, links and engines are simulated. The model has no grouped queries, like the one with
which the paper shows that decode instances run out of memory (Figure 1c). The keys and values of 111,000 tokens fit
beside its weights, which is 55 requests of 2,000 tokens. Answers are long, so a burst needs one or two more prefill
instances, but ten more decode instances. Requests come at random: few, then eight times as many for a quarter of a
minute, then few again.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from medusa_cluster.simulation.fleet import GBIT, Fleet, Machine, Model
from medusa_cluster.simulation.profiles import GB, PROFILES
from medusa_cluster.simulation.result import percentile
from medusa_cluster.simulation.simulator import Simulation
from medusa_cluster.simulation.strategy import strategy_named, with_bounds
from medusa_cluster.simulation.trace import Request

from benchmarks.pipeline.options import Options
from benchmarks.result_row import row
from benchmarks.simulation.blitzscale import BOUNDS

_SECONDS, _BURST = 60.0, (20.0, 35.0)
_RATE, _BURST_RATE = 3.0, 24.0  # requests a second
_PROMPT, _OUTPUT = 1000, 1000
_BURSTS = 9
_HOSTS, _CONCURRENCY = 32, 55
_PREFILL_TOKENS_PER_S = 12_000.0
_SYSTEMS = {
    "blitzscale": "disaggregation",
    "s-llm": "disaggregation-s-llm",
}  # weights from other hosts; from each host's disk


def rows(_: Options) -> list[dict[str, Any]]:
    return [found for system, name in _SYSTEMS.items() for found in _rows(system, name)]


def _rows(system: str, name: str) -> list[dict[str, Any]]:
    ttft: dict[bool, list[float]] = {False: [], True: []}
    tpot: dict[bool, list[float]] = {False: [], True: []}
    for seed in range(_BURSTS):
        for prescale in ttft:
            p99, mean = burst(system, seed, prescale=prescale)
            ttft[prescale].append(p99)
            tpot[prescale].append(mean)
    ratios = [without / with_ for without, with_ in zip(ttft[False], ttft[True], strict=True)]
    return [
        row(f"{name}-without", "ttft_p99_s", "s", ttft[False]),
        row(f"{name}-with", "ttft_p99_s", "s", ttft[True]),
        row(f"{name}-without", "tpot_s", "s", tpot[False]),
        row(f"{name}-with", "tpot_s", "s", tpot[True]),
        row(name, "ttft_p99_ratio", "ratio", ratios),
    ]


def burst(system: str, seed: int, *, prescale: bool) -> tuple[float, float]:
    """Simulate a burst, and return its p99 TTFT and its mean TPOT, in seconds."""
    strategy = with_bounds(strategy_named(system), BOUNDS)
    strategy = replace(strategy, policy=replace(strategy.policy, prescale=prescale))
    outcome = Simulation(_fleet(), strategy, _requests(seed), tick_s=0.1).run()
    found = sorted(value for value in outcome.ttft_s if math.isfinite(value))
    return percentile(found, 0.99), outcome.mean_tpot_s()


def _fleet() -> Fleet:
    """Return hosts with one A100 each, with the links and disks of the paper's clusters."""
    host = Machine("host", _HOSTS, 100 * GBIT, 1, memory_bytes=1000 * GB, store_bytes_per_s=10 * GBIT)
    model = Model(
        "m",
        PROFILES["llama2-7b@a100"],
        "",
        0.45,
        0.2,
        min=1,
        tokens_per_s=_PREFILL_TOKENS_PER_S,
        concurrency=_CONCURRENCY,
        disaggregated=True,
    )
    return Fleet("llama2-7b", (host,), (model,))


def _requests(seed: int) -> list[Request]:
    random_ = random.Random(seed)
    found, at = [], 0.0
    while at < _SECONDS:
        found.append(Request(at, 0, _PROMPT, _OUTPUT))
        at += random_.expovariate(_BURST_RATE if _BURST[0] <= at < _BURST[1] else _RATE)
    return found
