"""A burst on prefill and decode instances, with and without decode instances scaled in step (BlitzScale §5.4).

The product's policy decides; nodes, links and engines are the simulator's, of the paper's testbed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from medusa_cluster.simulation.result import percentile
from medusa_cluster.simulation.simulator import Simulation
from medusa_cluster.simulation.strategy import strategy_named, with_bounds

from benchmarks.pipeline.options import Options, row
from benchmarks.simulation.blitzscale import BOUNDS, fleet, requests

_TRACE, _SECONDS = "azure-conv", 120.0


def rows(_: Options) -> list[dict[str, Any]]:
    base = fleet(_TRACE)
    nodes = replace(base, models=tuple(replace(model, disaggregated=True) for model in base.models))
    found: dict[bool, list[float]] = {}
    tpot: dict[bool, list[float]] = {}
    for prescale in (False, True):
        strategy = with_bounds(strategy_named("blitzscale"), BOUNDS)
        strategy = replace(strategy, policy=replace(strategy.policy, prescale=prescale))
        outcome = Simulation(nodes, strategy, requests(_TRACE, _SECONDS), tick_s=0.1).run()
        ttft = sorted(value for value in outcome.ttft_s if math.isfinite(value))
        found[prescale], tpot[prescale] = [percentile(ttft, 0.99)], [outcome.mean_tpot_s()]
    return [
        row("disaggregation-without", "ttft_p99_s", "s", found[False]),
        row("disaggregation-with", "ttft_p99_s", "s", found[True]),
        row("disaggregation-without", "tpot_s", "s", tpot[False]),
        row("disaggregation-with", "tpot_s", "s", tpot[True]),
        row("disaggregation", "ttft_p99_ratio", "ratio", [found[False][0] / found[True][0]]),
    ]
