"""Compare strategies on fleets with links of different speed: ``python -m benchmarks.simulation.mixed_links``.

The fleets are ``examples/fleet/mixed-links.yaml`` with links of 64 or 100 Gbit/s beside 5 to 16. First fit takes nodes
in the order of their names, so each fleet is there twice: with the fast ones first, and with the slow ones first.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from medusa_cluster.simulation.fleet import GBIT
from medusa_cluster.simulation.fleet_file import read_simulation_plan
from medusa_cluster.simulation.result import mean, percentile
from medusa_cluster.simulation.simulator import Simulation
from medusa_cluster.simulation.strategy import strategy_named
from medusa_runtime.container_limits import cpu_count

from benchmarks import command_line

_FLEET = Path("examples/fleet/mixed-links.yaml")
_STRATEGIES = ("medusa", "serverlessllm")
_LINKS_GBIT = ((64, 5), (64, 10), (100, 5), (100, 10), (100, 16))
_ORDERS = ("fast", "slow")
_RATES = (0.5, 1.0)
_SEEDS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Load:
    """A fleet's links in Gbit/s, the nodes that come first, and the requests a second."""

    links: tuple[int, int]
    first: str
    rate: float


@dataclass(frozen=True)
class Means:
    """Means of a load's runs: the percentage of first tokens in time, the 99th percentile of TTFT, device hours."""

    in_time: float
    p99_s: float
    device_hours: float


def measure(strategy: str, load: Load, seconds: float) -> Means:
    plan = read_simulation_plan(_FLEET)
    fast, slow = plan.fleet.machines
    machines = tuple(
        replace(machine, name=f"{machine.name != load.first:d}-{machine.name}", link_bytes_per_s=link * GBIT)
        for machine, link in zip((fast, slow), load.links, strict=True)
    )
    fleet = replace(plan.fleet, machines=machines)
    found = []
    for seed in _SEEDS:
        workload = replace(plan.workload, seed=seed, seconds=seconds)
        requests = workload.requests(fleet.models, plan.lengths, load.rate, plan.workload.cvs[0])
        outcome = Simulation(fleet, strategy_named(strategy), requests, tick_s=plan.tick_s).run()
        in_time = 100 * outcome.attainment(lambda number: fleet.models[number].ttft_slo_s)
        found.append((in_time, percentile(outcome.ttft_s, 0.99), outcome.device_s / 3600))
    return Means(*(mean(values) for values in zip(*found, strict=True)))


def main(argv: Sequence[str] | None = None) -> int:
    """Print the means of each load, and of all loads, as a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation.mixed_links", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--seconds", type=float, default=1200.0, metavar="S", help="length of the traces; 1200")
    arguments = parser.parse_args(argv)
    loads = [Load(*values) for values in product(_LINKS_GBIT, _ORDERS, _RATES)]
    pairs = [(strategy, load) for load in loads for strategy in _STRATEGIES]
    with ProcessPoolExecutor(cpu_count()) as pool:
        ran = pool.map(measure, *zip(*pairs, strict=True), [arguments.seconds] * len(pairs))
        found = dict(zip(pairs, ran, strict=True))
    print("| links, nodes that come first, requests a second | strategy | first tokens in time | p99 | device hours |")
    print("|---|---|---|---|---|")
    for strategy, load in pairs:
        links = " and ".join(map(str, load.links))
        _print(f"{links} Gbit/s, {load.first}, {load.rate:g}", strategy, found[strategy, load])
    for first, strategy in product((*_ORDERS, "all"), _STRATEGIES):
        rows = [found[strategy, load] for load in loads if first in (load.first, "all")]
        overall = Means(*(mean([getattr(row, name) for row in rows]) for name in Means.__dataclass_fields__))
        _print(f"all loads, {first}", strategy, overall)
    return 0


def _print(what: str, strategy: str, means: Means) -> None:
    print(f"| {what} | {strategy} | {means.in_time:.1f} % | {means.p99_s:.1f} s | {means.device_hours:.1f} |")


if __name__ == "__main__":
    command_line.run(main)
