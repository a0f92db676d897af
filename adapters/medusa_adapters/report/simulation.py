"""Simulated strategies as one self-contained page: attainment, latency, cost, and the effect of a change."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from medusa_cluster.simulation.experiment import Summary, hardest_run, needed_change
from medusa_cluster.simulation.fleet_file import SimulationPlan

from .html import STYLE
from .lines import Series, lines


def simulation_page(plan: SimulationPlan, runs: Sequence[Summary], changed: Sequence[Summary]) -> str:
    """Return the page. ``changed`` are the first strategy's runs in other fleets."""
    sections = [
        _headline(plan, runs),
        _goal(plan, runs),
        _changes(plan, runs, changed),
        _charts(
            "Requests that meet their first-token SLO", "percent", runs, lambda run: 100 * run.ttft_attainment, 100
        ),
        _charts("Time to the first token, 99th percentile", "seconds", runs, lambda run: run.ttft_p99_s),
        _charts("Devices in use", "device hours", runs, lambda run: run.device_hours),
        _where(runs),
        _table(plan, runs),
        _fleet(plan),
    ]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>medusa simulate: {escape(plan.fleet.name)}</title><style>{STYLE}</style></head>
<body><main>
{"".join(section for section in sections if section)}
</main></body></html>
"""


def _headline(plan: SimulationPlan, runs: Sequence[Summary]) -> str:
    """Return the best result under the hardest load, which is the one under which the first strategy does worst."""
    best, meeting = _best(plan, _under(runs, hardest_run(plan, runs)))
    which = "the cheapest strategy that meets the goal" if meeting else "the best strategy"
    return (
        f'<p class="kicker">simulated · {escape(plan.fleet.name)} · {plan.fleet.devices:,} devices · '
        f"{len(plan.fleet.models):,} models</p><h1>{100 * best.ttft_attainment:.1f}<span> % of the requests get their "
        f"first token in time</span></h1><p class='versus'>with <strong>{escape(best.strategy)}</strong>, {which} "
        f"under the hardest load ({_load(best)}), for {_hours(best)} device hours</p>"
    )


def _goal(plan: SimulationPlan, runs: Sequence[Summary]) -> str:
    """Return the cheapest strategy that meets the goal, for each load."""
    rows = ""
    for load in {(run.rate, run.cv): run for run in runs}.values():
        best, meeting = _best(plan, _under(runs, load))
        if meeting:
            why = "the only one" if meeting == 1 else f"the fewest device hours of {meeting} that meet it"
            answer = f"{escape(best.strategy)}<small>{why}</small>"
        else:
            answer = f"none<small>{escape(best.strategy)} comes closest</small>"
        rows += (
            f"<tr><td>{load.rate:g}/s<small>CV {load.cv:g}, {load.requests:,} requests</small></td><td>{answer}</td>"
            f"<td>{100 * best.ttft_attainment:.1f} %</td><td>{_hours(best)}"
            f"{f'<small>{best.cost:,.2f}</small>' if plan.device_hour else ''}</td></tr>"
        )
    return (
        f"<section><h2>Who meets the goal</h2><p>The goal: {100 * plan.goal:g} % of the first tokens in time. The CV, "
        "the coefficient of variation of the gaps between a model's requests, says how they come: 1 is by chance, and "
        "more is in bursts. In a short time with a large CV, how many come is left to chance, too.</p>"
        "<div class='wide'><table class='numbers'><thead><tr><th>load</th><th>strategy</th><th>in time</th>"
        f"<th>device hours{'<small>cost</small>' if plan.device_hour else ''}</th></tr></thead>"
        f"<tbody>{rows}</tbody></table></div></section>"
    )


def _under(runs: Sequence[Summary], load: Summary) -> list[Summary]:
    return [run for run in runs if (run.rate, run.cv) == (load.rate, load.cv)]


def _best(plan: SimulationPlan, runs: Sequence[Summary]) -> tuple[Summary, int]:
    """Return the cheapest run that meets the goal, else the one that comes closest; and how many meet it."""
    meeting = [run for run in runs if run.ttft_attainment >= plan.goal]
    if meeting:
        return min(meeting, key=lambda run: run.device_hours), len(meeting)
    return max(runs, key=lambda run: (run.ttft_attainment, -run.device_hours)), 0


def _load(run: Summary) -> str:
    return f"{run.rate:g} requests a second and a CV of {run.cv:g}"


def _hours(run: Summary) -> str:
    return f"{run.device_hours:,.{1 if run.device_hours >= 10 else 2}f}"


def _charts(title: str, unit: str, runs: Sequence[Summary], value: object, top: float | None = None) -> str:
    """Draw one chart for each CV: the value over the rate; or over the CV, where there is one rate only."""
    assert callable(value)
    rates, cvs = sorted({run.rate for run in runs}), sorted({run.cv for run in runs})
    drawn = []
    if len(rates) > 1:
        for cv in cvs:
            series: Series = _series([run for run in runs if run.cv == cv], lambda run: run.rate, value)
            drawn.append(f"<h3>CV {cv:g}</h3>{lines(series, 'requests a second', unit, top=top)}")
    elif len(cvs) > 1:
        drawn.append(lines(_series(runs, lambda run: run.cv, value), "CV of the gaps", unit, top=top))
    else:
        highest = max((value(run) for run in runs), default=0.0) or 1.0
        drawn += [
            f'<div class="row {"ours" if run.strategy == "medusa" else "other"}">'
            f'<span class="label">{escape(run.strategy)}</span><span class="lane">'
            f'<i class="bar" style="width:{value(run) / highest * 100:.1f}%"></i></span>'
            f'<span class="value">{value(run):.3g}</span></div>'
            for run in runs
        ]
    return f"<section><h2>{title}</h2><p>In {unit}.</p>{''.join(drawn)}</section>"


def _series(runs: Sequence[Summary], x: object, y: object) -> dict[str, list[tuple[float, float]]]:
    assert callable(x)
    assert callable(y)
    found: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        found.setdefault(run.strategy, []).append((x(run), y(run)))
    return {name: sorted(points) for name, points in found.items()}


def _where(runs: Sequence[Summary]) -> str:
    rows = "".join(
        f"<tr><td>{escape(run.strategy)}<small>{run.rate:g}/s, CV {run.cv:g}</small></td>"
        f"<td>{run.ttft_mean_s:.2f}<small>{run.queued_mean_s:.2f} · {_waits_inside_s(run):.2f} · "
        f"{run.prefill_mean_s:.2f}</small></td>"
        f"<td>{run.cold_starts:,}<small>{run.requests / max(run.cold_starts, 1):.1f}</small></td>"
        f"<td>{run.fetched_gb:,.0f}<small>{run.store_gb:,.0f}</small></td>"
        f"<td>{run.largest_backlog:,}</td><td>{run.unanswered:,}</td></tr>"
        for run in runs
    )
    return (
        "<section><h2>Where the time went</h2><p>A request waits for an instance, while one starts or while none can "
        "start; then in the instance, for others; then for its own prefill. Many cold starts point to instances that "
        "start, a long queue with few of them to instances that cannot.</p>"
        "<div class='wide'><table class='numbers'><thead><tr><th>run</th>"
        "<th>mean TTFT, s<small>for an instance · in it · prefill</small></th>"
        "<th>cold starts<small>requests for each</small></th><th>GB moved<small>from the store</small></th>"
        "<th>longest queue</th>"
        f"<th>never answered</th></tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _waits_inside_s(run: Summary) -> float:
    return max(run.ttft_mean_s - run.queued_mean_s - run.prefill_mean_s, 0.0)


def _changes(plan: SimulationPlan, runs: Sequence[Summary], changed: Sequence[Summary]) -> str:
    if not changed:
        return ""
    base = hardest_run(plan, runs)
    rows = "".join(
        f"<tr><td>{escape(run.change) or 'as it is'}</td><td>{100 * run.ttft_attainment:.1f} %</td>"
        f"<td>{'met' if run.ttft_attainment >= plan.goal else 'missed'}</td>"
        f"<td>{run.ttft_p99_s:.2f} s</td><td>{_hours(run)}</td></tr>"
        for run in (base, *changed)
    )
    return (
        f"<section><h2>What would have to change</h2><p>{escape(needed_change(plan, base, changed))}</p>"
        "<div class='wide'><table class='numbers'><thead><tr><th>change</th>"
        "<th>in time</th><th>goal</th><th>p99</th>"
        f"<th>device hours</th></tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _table(plan: SimulationPlan, runs: Sequence[Summary]) -> str:
    priced = plan.device_hour > 0
    rows = "".join(
        f"<tr><td>{escape(run.strategy)}<small>{run.rate:g}/s, CV {run.cv:g}</small></td>"
        f"<td>{100 * run.ttft_attainment:.1f} %</td><td>{100 * run.tpot_attainment:.1f} %</td>"
        f"<td>{run.ttft_mean_s:.2f}<small>{run.ttft_p50_s:.2f} · {run.ttft_p95_s:.2f} · {run.ttft_p99_s:.2f}</small>"
        "</td>"
        f"<td>{1000 * run.tpot_mean_s:.0f}<small>{1000 * run.tpot_p99_s:.0f}</small></td>"
        f"<td>{_hours(run)}{f'<small>{run.cost:,.2f}</small>' if priced else ''}</td></tr>"
        for run in runs
    )
    return (
        "<section><h2>All numbers</h2><p>TTFT is the time to the first token, TPOT the time for each of the others.</p>"
        "<div class='wide'><table class='numbers'><thead><tr><th>run</th>"
        "<th>first token in time</th>"
        "<th>other tokens in time</th><th>TTFT, s<small>p50 · p95 · p99</small></th><th>TPOT, ms<small>p99</small></th>"
        f"<th>device hours{'<small>cost</small>' if priced else ''}</th></tr></thead><tbody>{rows}</tbody></table>"
        "</div></section>"
    )


def _fleet(plan: SimulationPlan) -> str:
    lines_ = "".join(
        f"<dt>{escape(machine.name)}</dt>"
        f"<dd>{machine.count:,} × {machine.devices} {escape(machine.device) or 'devices'}, "
        f"{machine.link_bytes_per_s * 8 / 1e9:g} Gbit/s, {machine.memory_bytes / 1e9:,.0f} GB</dd>"
        for machine in plan.fleet.machines
    )
    models = len(plan.fleet.models)
    size = sum(model.profile.size_bytes for model in plan.fleet.models) / 1e9
    lines_ += f"<dt>models</dt><dd>{models:,}, {size:,.0f} GB together</dd>"
    return f"<section><h2>The fleet</h2><dl>{lines_}</dl></section>"
