"""Measure the load of 10,000 devices on a controller, and the cost of simulating them.

``python -m benchmarks.simulation.scale`` simulates the beginning of ``examples/fleet/ten-thousand-devices.yaml``.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from medusa_cluster.simulation.fleet_file import read_simulation_plan
from medusa_cluster.simulation.result import Outcome
from medusa_cluster.simulation.simulator import Simulation
from medusa_cluster.simulation.strategy import strategy_named
from medusa_runtime.errors import ConfigError

from benchmarks import command_line

_FLEET = Path("examples/fleet/ten-thousand-devices.yaml")
_POLLS_PER_S = 4.0  # of each node, over HTTP
_CALLS_PER_S = 1.0  # of each node, by Ray
_REPORTS_PER_S = 10.0  # of each gateway


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate the fleet, and print a table. Raises ConfigError for a bad option."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation.scale", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--seconds", type=float, default=1200.0, metavar="S", help="of the day; 1200, 86400 for all")
    parser.add_argument("--gateways", type=int, default=20, metavar="N", help="20")
    arguments = parser.parse_args(argv)
    if not arguments.seconds > 0:
        raise ConfigError(f"--seconds: expected a number above 0, found {arguments.seconds:g}")
    plan = read_simulation_plan(_FLEET)
    workload, fleet = replace(plan.workload, seconds=arguments.seconds), plan.fleet
    began_s, began_wall_s = time.process_time(), time.monotonic()
    requests = workload.requests(fleet.models, plan.lengths, workload.rates[0], 1.0)
    outcome = Simulation(fleet, strategy_named("medusa"), requests, tick_s=plan.tick_s).run()
    taken_s = time.process_time() - began_s
    wall_s = time.monotonic() - began_wall_s
    print(table(outcome, fleet.devices, len(fleet.models), arguments.gateways, taken_s, wall_s))
    return 0


def table(outcome: Outcome, nodes: int, models: int, gateways: int, taken_s: float, wall_s: float) -> str:
    """Return the counts as a Markdown table. ``taken_s`` is CPU time, ``wall_s`` the time that passed."""
    seconds = outcome.seconds
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows = [
        ("requests a second", f"{outcome.requests / seconds:.1f}"),
        ("starts a second", f"{outcome.cold_starts / seconds:.2f}"),
        ("decisions a second, of all kinds", f"{outcome.decisions / seconds:.1f}"),
        ("one look at the cluster, mean", f"{1000 * outcome.decide_s / max(outcome.ticks, 1):.1f} ms of a core"),
        ("messages a second, polling", f"{nodes * (_POLLS_PER_S + _CALLS_PER_S):,.0f}"),
        (f"messages a second, {gateways} gateways", f"{gateways * _REPORTS_PER_S:,.0f}"),
        ("requests simulated for a second of a core", f"{outcome.requests / taken_s:,.0f}"),
        ("simulated time for a second of a core", f"{seconds / taken_s:,.0f} s"),
        ("all of it", f"{taken_s:.1f} s of a core, {wall_s:.1f} s by the clock, {peak_mb:.0f} MB"),
    ]
    head = f"{nodes:,} devices, {models:,} models, {seconds / 60:,.0f} minutes"
    return "\n".join([f"| {head} | |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows)])


if __name__ == "__main__":
    command_line.run(main)
