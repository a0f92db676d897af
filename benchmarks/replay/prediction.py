"""The simulation of the same requests, with a machine's calibrated times."""

from __future__ import annotations

from collections.abc import Sequence

from medusa_cluster.simulation.fleet import Machine, Model
from medusa_cluster.simulation.profiles import Profile
from medusa_cluster.simulation.result import Outcome
from medusa_cluster.simulation.simulator import Simulation
from medusa_cluster.simulation.strategy import Strategy
from medusa_cluster.simulation.trace import Request

from benchmarks.replay.calibration import Calibration
from benchmarks.replay.machine import TICK_S, policy

_BATCH_TOKENS = 2048  # the default of `medusa serve` and of vLLM on a CPU


def simulate(
    calibration: Calibration,
    requests: Sequence[Request],
    *,
    slots: int,
    concurrency: int,
    keep_alive_s: float,
    seed: int = 1,
) -> Outcome:
    """Simulate one machine that has the weights. ``seed`` determines how its starts and prefills vary."""
    profile = Profile(1, 1, calibration.stages, calibration.speed)
    model = Model("model", profile, max=slots, concurrency=concurrency, batch_tokens=_BATCH_TOKENS)
    machine = Machine("machine", 1, 1e12, slots)
    strategy = Strategy("replay", cache="all", policy=policy(keep_alive_s))
    fleet = calibration.fleet("machine", machine, model)
    return Simulation(fleet, strategy, requests, tick_s=TICK_S, quiet_s=TICK_S, seed=seed).run()
