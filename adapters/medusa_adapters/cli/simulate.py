"""`medusa simulate`: simulate how a fleet would serve a trace, with each of several strategies."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from medusa_cluster.simulation.experiment import Summary, hardest_run, needed_change, what_if
from medusa_cluster.simulation.experiment import run as run_plan
from medusa_cluster.simulation.fleet_file import read_simulation_plan
from medusa_cluster.simulation.strategy import strategy_named
from medusa_runtime.errors import ConfigError

from .flags import output_file
from .progress import CLEAR_LINE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("fleet", type=Path, metavar="FLEET.yaml", help="machines, models and requests")
    parser.add_argument("--strategies", metavar="LIST", help="instead of those in the file: names, with commas")
    parser.add_argument(
        "--what-if", action="store_true", help="also try larger and faster fleets until the goal is met"
    )
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write all numbers to this file")
    parser.add_argument("--report", type=output_file, metavar="FILE", help="write a page with charts to this file")


def run(arguments: argparse.Namespace) -> int:
    plan = read_simulation_plan(arguments.fleet)
    if all(math.isinf(model.ttft_slo_s) for model in plan.fleet.models):
        print("no model has an slo with a ttft: every first token counts as in time", file=sys.stderr)
    if arguments.strategies:
        names = tuple(name.strip() for name in arguments.strategies.split(",") if name.strip())
        if not names:
            raise ConfigError("--strategies: expected at least one name, found none")
        try:
            plan = replace(plan, strategies=tuple(strategy_named(name).name for name in names))
        except ConfigError as error:
            raise ConfigError(f"--strategies: {error}") from None
    progress = _Progress()
    runs = []
    for summary in run_plan(plan, progress.show):
        progress.clear()
        runs.append(summary)
        print(_line(summary), flush=True)
    changed: list[Summary] = []
    if arguments.what_if:
        first = hardest_run(plan, runs)
        for summary in what_if(plan, first.strategy, *_asked(plan.workload.rates, first.rate), first.cv, progress.show):
            progress.clear()
            changed.append(summary)
            print(_line(summary), flush=True)
        print(needed_change(plan, first, changed))
    if arguments.json:
        document = {"fleet": plan.fleet.name, "runs": [item.to_json() for item in (*runs, *changed)]}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    if arguments.report:
        from ..report.simulation import simulation_page

        arguments.report.write_text(simulation_page(plan, runs, changed))
        print(f"report: {arguments.report}", file=sys.stderr)
    return 0


def _asked(rates: Sequence[float], rate: float) -> tuple[float]:
    """Return the rate as in the file, where 0 stands for a recorded trace's own rate."""
    return (rate if rate in rates else 0.0,)


def _line(run: Summary) -> str:
    change = f"  ({run.change})" if run.change else ""
    return (
        f"{run.strategy:16} {run.rate:8.3g}/s  CV {run.cv:<4g} {run.requests:9,} requests  "
        f"first token in time {100 * run.ttft_attainment:5.1f} %  "
        f"p50 {run.ttft_p50_s:6.2f} s  p99 {run.ttft_p99_s:7.2f} s  {run.device_hours:10,.2f} device hours  "
        f"{run.cold_starts:6} starts{change}"
    )


class _Progress:
    """One line on the terminal, which is overwritten. It shows nothing if the output is not a terminal."""

    def show(self, title: str, part: float) -> None:
        self._write(f"{CLEAR_LINE}{title}: {100 * part:3.0f} %")

    def clear(self) -> None:
        self._write(CLEAR_LINE)

    def _write(self, text: str) -> None:
        if sys.stderr.isatty():
            print(text, end="", file=sys.stderr, flush=True)
