"""The runs of a plan: each strategy with each rate and each coefficient of variation, and the effect of changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from medusa_runtime.errors import ConfigError

from .fleet import Fleet
from .fleet_file import SimulationPlan
from .result import Outcome, percentile
from .simulator import Simulation
from .strategy import strategy_named

Progress = Callable[[str, float], None]  # takes the name of the run, and how much of it is done, from 0 to 1


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in numbers. Latencies are of requests that were answered; the others count as missed.

    ``queued_mean_s`` and ``prefill_mean_s`` are parts of the mean time to the first token: before an instance took the
    request, and during its prefill. The rest is waiting in the instance.
    """

    strategy: str
    rate: float
    cv: float
    change: str  # what was changed in the fleet; "": nothing
    requests: int
    unanswered: int
    ttft_attainment: float
    tpot_attainment: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    queued_mean_s: float
    prefill_mean_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    device_hours: float
    cost: float
    cold_starts: int
    fetched_gb: float
    store_gb: float
    largest_backlog: int
    ticks: int
    decide_ms: float  # of the processor, of one decision, on average

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run(plan: SimulationPlan, progress: Progress | None = None) -> Iterator[Summary]:
    """Yield the runs of a plan as they end."""
    for cv in plan.workload.cvs:
        for rate in plan.workload.rates:
            for name in plan.strategies:
                yield simulate(plan, name, rate, cv, progress=progress)


def hardest_run(plan: SimulationPlan, runs: Sequence[Summary]) -> Summary:
    """Return the run in which the plan's first strategy has the fewest first tokens in time."""
    return min((run for run in runs if run.strategy == plan.strategies[0]), key=lambda run: run.ttft_attainment)


def needed_change(plan: SimulationPlan, base: Summary, changed: Sequence[Summary]) -> str:
    """Return a sentence that says which changes would meet the goal under the load of ``base``."""
    what = f"{base.strategy} at {base.rate:g} requests a second and a CV of {base.cv:g}"
    reached = f"{what} has {100 * base.ttft_attainment:.1f} % of the first tokens in time"
    if base.ttft_attainment >= plan.goal:
        return f"{reached}, which meets the goal of {100 * plan.goal:g} % as it is."
    meeting = [run.change for run in changed if run.ttft_attainment >= plan.goal]
    if meeting:
        return f"{reached}. The goal of {100 * plan.goal:g} % is met with {', or with '.join(meeting)}."
    best = max(changed, key=lambda run: run.ttft_attainment)
    return (
        f"{reached}. None of the changes meets the goal of {100 * plan.goal:g} %; "
        f"the best is {best.change}, with {100 * best.ttft_attainment:.1f} %."
    )


def what_if(
    plan: SimulationPlan, strategy: str, rate: float, cv: float, progress: Progress | None = None
) -> Iterator[Summary]:
    """Yield the same run in changed fleets, with more and more of one thing until the goal is met."""
    for steps in changes(plan.fleet):
        for text, fleet in steps:
            summary = simulate(replace(plan, fleet=fleet), strategy, rate, cv, change=text, progress=progress)
            yield summary
            if summary.ttft_attainment >= plan.goal:
                break


def changes(fleet: Fleet) -> Iterator[list[tuple[str, Fleet]]]:
    """Yield fleets that have more of one thing, from less to more."""
    yield [(f"{times:g} times the machines", _more_machines(fleet, times)) for times in (1.5, 2, 3)]
    yield [(f"links and disks {times} times as fast", _faster_links(fleet, times)) for times in (2, 4)]
    least = tuple(replace(model, min=max(model.min, 1)) for model in fleet.models)
    if len(least) <= fleet.devices:
        yield [("one instance of each model always there", replace(fleet, models=least))]


def _more_machines(fleet: Fleet, times: float) -> Fleet:
    machines = (replace(machine, count=math.ceil(machine.count * times)) for machine in fleet.machines)
    return replace(fleet, machines=tuple(machines))


def _faster_links(fleet: Fleet, times: float) -> Fleet:
    machines = (
        replace(
            machine,
            link_bytes_per_s=times * machine.link_bytes_per_s,
            store_bytes_per_s=times * machine.store_bytes_per_s,
        )
        for machine in fleet.machines
    )
    return replace(fleet, machines=tuple(machines), store_bytes_per_s=times * fleet.store_bytes_per_s)


def simulate(
    plan: SimulationPlan, strategy: str, rate: float, cv: float, *, change: str = "", progress: Progress | None = None
) -> Summary:
    workload, fleet = plan.workload, plan.fleet
    requests = workload.requests(fleet.models, plan.lengths, rate, cv)
    if not requests:
        raise ConfigError(f"requests: expected a longer time or a higher rate, found no request at {rate:g} a second")
    end = max(requests[-1].at_s, 1.0)
    title = f"{strategy}, {rate:g}/s, CV {cv:g}" + (f", {change}" if change else "")
    outcome = Simulation(
        fleet,
        strategy_named(strategy),
        requests,
        tick_s=plan.tick_s,
        progress=None if progress is None else lambda at: progress(title, min(at / end, 1.0)),
    ).run()
    if progress is not None:
        progress(title, 1.0)
    return summarize(outcome, fleet, rate or len(requests) / end, cv, change, plan.device_hour)


def summarize(outcome: Outcome, fleet: Fleet, rate: float, cv: float, change: str, price: float) -> Summary:
    ttft = [value for value in outcome.ttft_s if math.isfinite(value)]
    tpot = [value for value in outcome.tpot_s if math.isfinite(value)]
    hours = outcome.device_s / 3600
    return Summary(
        outcome.strategy,
        rate,
        cv,
        change,
        outcome.requests,
        outcome.requests - len(ttft),
        outcome.attainment(lambda number: fleet.models[number].ttft_slo_s),
        outcome.attainment(lambda number: math.inf, lambda number: fleet.models[number].tpot_slo_s),
        outcome.mean_ttft_s(),
        percentile(ttft, 0.5),
        percentile(ttft, 0.95),
        percentile(ttft, 0.99),
        outcome.queued_s / max(outcome.ended, 1),
        outcome.prefill_s / max(outcome.ended, 1),
        outcome.mean_tpot_s(),
        percentile(tpot, 0.99),
        hours,
        hours * price,
        outcome.cold_starts,
        outcome.moved_bytes / 1e9,
        outcome.store_bytes / 1e9,
        outcome.largest_backlog,
        outcome.ticks,
        outcome.decide_s * 1000 / outcome.ticks if outcome.ticks else 0.0,
    )
