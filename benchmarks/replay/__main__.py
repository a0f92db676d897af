"""Replay traces on real processes and in the simulator: ``python -m benchmarks.replay``.

Without options it takes about ten minutes. ``--full`` replays more scenarios on more systems, two minutes of each.
``--tail`` takes three minutes. It compares the slowest first tokens at ten requests per second with those of other
systems.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from medusa_adapters.bench.bytecode import compile_packages
from medusa_adapters.bench.coldstart.rows import check_vllm
from medusa_adapters.bench.result import Result, Target, targets_table
from medusa_cluster.simulation.result import Outcome, percentile
from medusa_cluster.simulation.trace import Request
from medusa_runtime.errors import ConfigError

from benchmarks import command_line
from benchmarks.promised import check_checkpoint
from benchmarks.replay import lab, scenario
from benchmarks.replay.calibration import Samples, calibrate, fill_caches, sample
from benchmarks.replay.machine import Machine, Replayed, unanswered
from benchmarks.replay.prediction import simulate
from benchmarks.replay.systems import MEANING, SYSTEMS, System, system_named

_NEAR = 0.15  # how far a near figure may be from the measured one, as a share of it
_UNITS = {"attainment": "%", "starts": ""}
_COMPARED = ("ttft_p50", "ttft_p99", "node_s")
_SEEDS = range(1, 10)  # one for each simulated run; its starts vary as much as the sampled ones
_SHORT = {"scenarios": "azure-code,poisson-2", "systems": "medusa,medusa-bundle,medusa-agent", "seconds": 20.0}
_FULL = {
    "scenarios": "azure-code,azure-conv,gamma,poisson-2,poisson-10",
    "systems": "medusa,medusa-bundle,medusa-agent,transformers,vllm-eager,vllm-warm-cache",
    "seconds": 120.0,
}
_TAIL = {
    "scenarios": "poisson-10",
    "systems": "medusa-agent,medusa-bundle,vllm-eager",
    "seconds": 8.0,
}
_TAIL_LESS = 0.53  # the largest share by which MEDUSA's p99 TTFT is below vLLM's (Figure 10)


@dataclass(frozen=True)
class Options:
    """How each scenario is replayed.

    ``slots`` is the number of instances at the same time, and ``context`` the model's context in tokens. Each scenario
    is replayed ``repeat`` times and, if ``simulated``, also run in the simulator.
    """

    slots: int
    keep_alive_s: float
    ttft_slo_s: float
    tpot_slo_s: float
    context: int
    repeat: int = 3
    simulated: bool = True


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parsed(argv)
    check_checkpoint(arguments.model)
    context = json.loads((arguments.model / "config.json").read_text())["max_position_embeddings"]
    shape = scenario.Shape(
        arguments.seconds, arguments.lengths, context, arguments.rate, arguments.cv, arguments.begin, arguments.seed
    )
    traces = {
        name: scenario.requests(name, shape) for name in filter(None, map(str.strip, arguments.scenarios.split(",")))
    }
    names = command_line.names("--systems", arguments.systems.strip("-"), SYSTEMS)
    check_vllm(names, arguments.vllm_python)
    if arguments.lab and os.geteuid():
        raise ConfigError("--lab: expected to run as root, which can make network namespaces")
    options = Options(
        arguments.slots,
        arguments.keep_alive,
        arguments.ttft_slo,
        arguments.tpot_slo,
        context,
        arguments.repeat,
        not arguments.tail,
    )
    compile_packages(sys.executable)
    result = Result()
    for name in names:
        with closing(system_named(name, arguments.model, arguments.vllm_python)) as system:
            measure(result, system, traces, options)
    if arguments.lab:
        names = [*names, lab.LabSystem.name]
        with lab.cluster_of(arguments.model, arguments.lab) as cluster:
            measure_lab(result, cluster, traces, options, arguments.lab, arguments.model)
    print(result.machine["cpu"], f"{result.machine['cores']} cores", arguments.model, sep=", ", end="\n\n")
    print(table(result, traces, names))
    if arguments.tail:
        print("\n" + targets_table(tails(result, traces, names)))
    else:
        print("\n" + nearness(result, traces, names))
    if arguments.json:
        result.write(arguments.json)
    return 0


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--model", type=Path, default=Path("examples/pydoc-lm"), metavar="DIR", help="a checkpoint")
    parser.add_argument("--full", action="store_true", help="all scenarios and systems, two minutes of each")
    parser.add_argument("--tail", action="store_true", help="p99 of TTFT against other systems, not simulated")
    parser.add_argument("--scenarios", metavar="LIST", help=f"of {', '.join(scenario.SCENARIOS)}, and files *.csv")
    parser.add_argument("--systems", metavar="LIST", help=f"of {', '.join(SYSTEMS)}; - for none, with --lab")
    parser.add_argument("--seconds", type=float, metavar="S", help="length of each scenario")
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="replay each scenario N times; 3")
    parser.add_argument(
        "--begin", type=float, default=186.0, metavar="S", help="where in a recorded trace it begins; 186"
    )
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second of recorded and Gamma arrivals; 2")
    parser.add_argument("--cv", type=float, default=4.0, help="coefficient of variation of Gamma arrivals; 4")
    parser.add_argument("--lengths", type=float, default=0.1, metavar="X", help="of a trace's tokens; 0.1")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--slots", type=int, default=1, metavar="N", help="instances at the same time; 1")
    parser.add_argument("--lab", type=int, default=0, metavar="N", help="also a cluster of N nodes in a laboratory")
    parser.add_argument("--keep-alive", type=float, default=2.0, metavar="S", help="of an idle instance; 2")
    parser.add_argument("--ttft-slo", type=float, default=1.0, metavar="S", help="1")
    parser.add_argument("--tpot-slo", type=float, default=0.1, metavar="S", help="0.1")
    parser.add_argument("--vllm-python", default=".venv-vllm/bin/python", metavar="PATH", help="that has vLLM")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    arguments = parser.parse_args(argv)
    if arguments.tail and (arguments.full or arguments.lab):
        raise ConfigError("--tail: expected neither --full nor --lab beside it")
    if arguments.repeat < 1:
        raise ConfigError(f"--repeat: expected a number of at least 1, found {arguments.repeat}")
    for name, value in (_TAIL if arguments.tail else _FULL if arguments.full else _SHORT).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return arguments


def measure(result: Result, system: System, traces: dict[str, list[Request]], options: Options) -> None:
    """Sample the system before and after each replay, so that a machine that gets slower affects both alike.

    Then calibrate the simulator with the samples, and simulate the same requests.
    """
    samples = Samples()
    print(f"{system.name}: {MEANING[system.name]}", file=sys.stderr, flush=True)
    fill_caches(system)
    if options.simulated:
        sample(system, options.context, samples)
    replayed: dict[str, list[Replayed]] = {name: [] for name in traces}
    for name, requests in list(traces.items()) * options.repeat:
        system.settle()
        print(f"  {name}: {len(requests)} requests …", file=sys.stderr, flush=True)
        machine = Machine(system, slots=options.slots, keep_alive_s=options.keep_alive_s)
        replayed[name].append(machine.replay(requests))
        if options.simulated:
            sample(system, options.context, samples)
    if not options.simulated:
        for name, found in replayed.items():
            add_measured(result, f"{name}, {system.name}", found, options)
        return
    calibration = calibrate(samples)
    for stage, seconds in calibration.recorded.items():
        result.add(system.name, f"recorded {stage}", "s", [seconds])
    for name, requests in traces.items():
        outcomes = [
            simulate(
                calibration,
                requests,
                slots=options.slots,
                concurrency=system.concurrency,
                keep_alive_s=options.keep_alive_s,
                seed=seed,
            )
            for seed in _SEEDS
        ]
        add_both(result, f"{name}, {system.name}", replayed[name], outcomes, options)


def measure_lab(
    result: Result, cluster: lab.LabSystem, traces: dict[str, list[Request]], options: Options, nodes: int, folder: Path
) -> None:
    """Do the same with a cluster. Its own controller decides how long an idle instance stays."""
    samples = Samples()
    cluster.sample(options.context, Samples())
    cluster.sample(options.context, samples)
    replayed: dict[str, list[Replayed]] = {name: [] for name in traces}
    for name, requests in list(traces.items()) * options.repeat:
        cluster.settle()
        print(f"  {name}: {len(requests)} requests …", file=sys.stderr, flush=True)
        replayed[name].append(cluster.replay(requests))
        cluster.sample(options.context, samples)
    calibration = calibrate(samples)
    for name, requests in traces.items():
        outcomes = [lab.simulate(calibration, requests, folder, nodes, seed) for seed in _SEEDS]
        add_both(result, f"{name}, {cluster.name}", replayed[name], outcomes, options)


def add_both(
    result: Result, row: str, measured: Sequence[Replayed], simulated: Sequence[Outcome], options: Options
) -> None:
    add_measured(result, row, measured, options)
    figures = [_figures(one.ttft_s, one.tpot_s, one.device_s, one.cold_starts, options) for one in simulated]
    _add(result, row, "simulated ", figures)


def add_measured(result: Result, row: str, measured: Sequence[Replayed], options: Options) -> None:
    figures = []
    for one in measured:
        times = [answer.ttft_s for answer in one.answers], [answer.tpot_s for answer in one.answers]
        figures.append(_figures(*times, one.node_s, one.starts, options))
    _add(result, row, "", figures)
    result.add(row, "unanswered", "", [float(unanswered(one)) for one in measured])


def _add(result: Result, row: str, kind: str, runs: Sequence[Mapping[str, float]]) -> None:
    for metric in runs[0]:
        result.add(row, f"{kind}{metric}", _UNITS.get(metric, "s"), [figures[metric] for figures in runs])


def _figures(
    ttft: Sequence[float], tpot: Sequence[float], node_s: float, starts: int, options: Options
) -> dict[str, float]:
    """Return the figures of a run, by metric."""
    pairs = zip(ttft, tpot, strict=True)
    met = sum(first <= options.ttft_slo_s and later <= options.tpot_slo_s for first, later in pairs)
    return {
        **{f"ttft_p{part}": percentile(ttft, part / 100) for part in (50, 95, 99)},
        "tpot_mean": sum(tpot) / len(tpot),
        "attainment": 100 * met / len(ttft),
        "node_s": node_s,
        "starts": float(starts),
    }


def table(result: Result, traces: dict[str, list[Request]], names: Sequence[str]) -> str:
    """Return a Markdown table of all scenarios and systems. A cell is measured / simulated, if it was simulated."""
    head = "| scenario | system | TTFT p50 s | p95 s | p99 s | TPOT ms | in time % | node-seconds | starts |"
    lines = ["measured / simulated", "", head, "|---" * 9 + "|"]
    metrics = ("ttft_p50", "ttft_p95", "ttft_p99", "tpot_mean", "attainment", "node_s", "starts")
    for trace in traces:
        for name in names:
            row = f"{trace}, {name}"
            cells = []
            for metric in metrics:
                scale = 1000 if metric == "tpot_mean" else 1
                pair = [result.median(row, f"{kind}{metric}") for kind in ("", "simulated ")]
                cells.append(" / ".join(f"{value * scale:.3g}" for value in pair if value is not None))
            lines.append(f"| {trace} | `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def nearness(result: Result, traces: dict[str, list[Request]], names: Sequence[str]) -> str:
    """Report how far each simulated figure is from the measured median, and how many are within 15 %.

    If a scenario was replayed several times, the report also has the range of these runs. A figure that is further off,
    but within that range, is one that the machine itself does not reproduce. As a yardstick, the report also counts the
    figures with a run that is more than 15 % from the median of the runs.
    """
    lines, near, ranged, scattered = [], 0, 0, 0
    found = {(row.name, row.metric): row for row in result.rows}
    for name in (f"{trace}, {name}" for trace in traces for name in names):
        for metric in _COMPARED:
            measured, simulated = found.get((name, metric)), result.median(name, f"simulated {metric}")
            if measured is None or not measured.median or not simulated:
                continue
            off = simulated / measured.median - 1
            word = "OFF" if abs(off) > _NEAR else "near"
            shown = f"{name}: {metric}, simulated {simulated:.3g}, measured {measured.median:.3g}"
            if measured.runs > 1:
                shown += f" ({measured.min:.3g} to {measured.max:.3g})"
                scattered += max(measured.max / measured.median - 1, 1 - measured.min / measured.median) > _NEAR
                word = "runs" if word == "OFF" and measured.min <= simulated <= measured.max else word
            near += word == "near"
            ranged += word == "runs"
            lines.append(f"{word:4}  {100 * off:+6.1f} %  {shown}")
    total = f"{near} of {len(lines)} simulated figures are within {100 * _NEAR:g} % of what was measured"
    total += f", {ranged} more in the range of the runs" if ranged else ""
    if scattered:
        total += f"; of {scattered} of them a run itself is further from the median of the runs"
    return "\n".join([*lines, total])


def tails(result: Result, traces: dict[str, list[Request]], names: Sequence[str]) -> list[Target]:
    """Compare the p99 TTFT of each of our systems with each other system's: the share by which ours is lower."""
    found = []
    ours = [name for name in names if name.startswith("medusa")]
    for trace in traces:
        p99 = {name: result.median(f"{trace}, {name}", "ttft_p99") for name in names}
        for name in ours:
            for other in names:
                mine, theirs = p99[name], p99[other]
                if other not in ours and mine is not None and theirs:
                    text = f"{trace}: p99 TTFT of {name}, {mine:.3g} s, below that of {other}, {theirs:.3g} s"
                    found.append(Target(text, 1 - mine / theirs, _TAIL_LESS))
    return found


if __name__ == "__main__":
    command_line.run(main)
