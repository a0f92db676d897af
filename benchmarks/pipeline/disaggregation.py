"""A burst on prefill and decode instances, with and without decode instances scaled in step (BlitzScale §5.4).

The product's policy decides; nodes, links and engines are the simulator's, of the paper's testbed with a 24B model.
Requests come at random: few, then eight times as many for a quarter of a minute, then few again.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from medusa_cluster.simulation.result import percentile
from medusa_cluster.simulation.simulator import Simulation
from medusa_cluster.simulation.strategy import strategy_named, with_bounds
from medusa_cluster.simulation.trace import Request

from benchmarks.pipeline.options import Options, row
from benchmarks.simulation.blitzscale import BOUNDS, fleet

_SECONDS, _BURST = 60.0, (20.0, 35.0)
_RATE, _BURST_RATE = 3.0, 24.0  # requests a second
_PROMPT, _OUTPUT = 1000, 200
_BURSTS = 9


def rows(_: Options) -> list[dict[str, Any]]:
    ttft: dict[bool, list[float]] = {False: [], True: []}
    tpot: dict[bool, list[float]] = {False: [], True: []}
    nodes = fleet("azure-conv")
    for seed in range(_BURSTS):
        for prescale in ttft:
            strategy = with_bounds(strategy_named("blitzscale"), BOUNDS)
            strategy = replace(strategy, policy=replace(strategy.policy, prescale=prescale))
            outcome = Simulation(nodes, strategy, _requests(seed), tick_s=0.1).run()
            found = sorted(value for value in outcome.ttft_s if math.isfinite(value))
            ttft[prescale].append(percentile(found, 0.99))
            tpot[prescale].append(outcome.mean_tpot_s())
    ratios = [without / with_ for without, with_ in zip(ttft[False], ttft[True], strict=True)]
    return [
        row("disaggregation-without", "ttft_p99_s", "s", ttft[False]),
        row("disaggregation-with", "ttft_p99_s", "s", ttft[True]),
        row("disaggregation-without", "tpot_s", "s", tpot[False]),
        row("disaggregation-with", "tpot_s", "s", tpot[True]),
        row("disaggregation", "ttft_p99_ratio", "ratio", ratios),
    ]


def _requests(seed: int) -> list[Request]:
    random_ = random.Random(seed)
    found, at = [], 0.0
    while at < _SECONDS:
        found.append(Request(at, 0, _PROMPT, _OUTPUT))
        at += random_.expovariate(_BURST_RATE if _BURST[0] <= at < _BURST[1] else _RATE)
    return found
