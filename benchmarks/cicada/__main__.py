"""``python -m benchmarks.cicada``: latency, memory and utilisation of cold inferences, strategy by strategy."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from medusa_adapters.bench.result import Result, Target, targets_table
from medusa_runtime.errors import CorruptError

from benchmarks.cicada import pipeline
from benchmarks.cicada.runner import ROOT, Container, Inference
from benchmarks.cicada.sample import Request

STRATEGIES = ("sequential", "pisel", "mini", "preload", "full")
_DEFAULT = "resnet50,resnet152,vgg16,vgg19,bert-base,llama-1b"
_PROMISED = {"vgg16": 2.0, "vgg19": 2.0, "resnet152": 2.0, "bert-base": 1.5, "llama-1b": 2.0}


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    models, strategies = _names(options.models), _names(options.strategies)
    from benchmarks.cicada.checkpoint import checkpoint
    from benchmarks.cicada.workload import NAMES, workload

    unknown = [name for name in models if name not in NAMES] + [name for name in strategies if name not in STRATEGIES]
    if unknown or options.runs < 1:
        _parser().error(f"unknown {unknown} or --runs below 1; models: {', '.join(NAMES)}; {', '.join(STRATEGIES)}")
    result = Result()
    with tempfile.TemporaryDirectory(prefix="medusa-cicada-") as scratch:
        for model in models:
            folder = checkpoint(workload(model), options.checkpoints)
            measure(result, model, strategies, folder, options, Path(scratch))
        if options.trace:
            from benchmarks.cicada.replay import replay

            folders = {model: checkpoint(workload(model), options.checkpoints) for model in models}
            replay(result, folders, strategies, options.trace, Path(scratch))
        if options.origin:
            from benchmarks.cicada.limited import measure_limited

            for model in models:
                measure_limited(result, model, options.checkpoints, options.runs, Path(scratch))
        if options.gates:
            from benchmarks.cicada.gates import measure_gates

            for model in models:
                measure_gates(result, model, checkpoint(workload(model), options.checkpoints), options.gates)
    print(result.table())
    print("\n" + targets_table(find_targets(result, models)))
    if options.json:
        result.write(options.json)
    return 0


def measure(
    result: Result,
    model: str,
    strategies: Sequence[str],
    folder: Path,
    options: argparse.Namespace,
    scratch: Path,
) -> None:
    """All rows of one model. CorruptError when a strategy's output is not the one of eager loading."""

    def infer(strategy: str, *, watch: bool = False) -> Inference:
        with Container(scratch) as container:
            container.wait_ready()
            found = container.infer(Request(model, strategy, str(folder)), watch=watch)
        _say(f"  {model}/{strategy}: {found.seconds:.3f} s" + (f", {found.peak_mb:,.0f} MB" if watch else ""))
        return found

    _say(f"{model}: outputs under each strategy against eager loading")
    expected = infer("sequential").digest
    for strategy in strategies:
        if infer(strategy).digest != expected:
            raise CorruptError(f"{model}/{strategy}: the output is not that of eager loading, bit for bit")
    timed: dict[str, list[Inference]] = defaultdict(list)
    watched: dict[str, list[Inference]] = defaultdict(list)
    for number in range(options.runs):
        turns = strategies if number % 2 == 0 else strategies[::-1]
        for strategy in turns:
            timed[strategy].append(infer(strategy))
        if number < options.memory_runs:
            for strategy in turns:
                watched[strategy].append(infer(strategy, watch=True))
    for strategy in strategies:
        _add_rows(result, f"{model}/{strategy}", timed[strategy], watched[strategy])
    if options.figures:
        from benchmarks.cicada.figure import draw

        options.figures.mkdir(parents=True, exist_ok=True)
        middle = {strategy: sorted(timed[strategy])[len(timed[strategy]) // 2].stages for strategy in strategies}
        for ending in ("svg", "png"):
            draw(model, middle, options.figures / f"{model}.{ending}")


def _add_rows(result: Result, name: str, timed: list[Inference], watched: list[Inference]) -> None:
    result.add(name, "latency_s", "s", [one.seconds for one in timed])
    result.add(name, "peak_mb", "MB", [one.peak_mb for one in watched])
    result.add(name, "added_mb", "MB", [one.added_mb for one in watched])
    result.add(name, "utilisation", "of 1", [pipeline.utilisation(one.stages) for one in timed])
    for unit, label in pipeline.NAMES.items():
        works = [pipeline.working(one.stages).get(unit) for one in timed]
        waits = [pipeline.waiting(one.stages).get(unit) for one in timed]
        result.add(name, f"{label}_working_s", "s", [seconds for seconds in works if seconds is not None])
        result.add(name, f"{label}_waiting_s", "s", [seconds for seconds in waits if seconds is not None])


def find_targets(result: Result, models: Sequence[str]) -> list[Target]:
    """What was promised, as far as it was measured."""
    found = []
    gains: dict[str, list[float]] = {"latency_s": [], "peak_mb": [], "added_mb": []}
    for model in models:
        ours, eager, pisel = (f"{model}/{strategy}" for strategy in ("full", "sequential", "pisel"))
        if (ratio := result.ratio("latency_s", eager, ours)) is not None:
            found.append(Target(f"{model}: load-then-run over ours", ratio, _PROMISED.get(model, 1.0)))
        for metric, gained in gains.items():
            if (ratio := result.ratio(metric, ours, pisel)) is not None:
                gained.append(ratio)
        if (used := result.median(ours, "utilisation")) is not None:
            found.append(Target(f"{model}: pipeline utilisation", used, 0.97))
        if (cost := result.ratio("warm_s", f"{model}/built", f"{model}/plain")) is not None:
            found.append(Target(f"{model}: a warm forward, over one without gates", cost, 1.005, False))
        pure, limited = (result.median(f"{model}/{name}", "latency_s") for name in ("limited-bound", "limited"))
        if pure and limited:
            found.append(Target(f"{model}: limited origin, over transfer and last layer", limited / pure, 1.1, False))
    for metric, bound in (("latency_s", 0.652), ("peak_mb", 0.54), ("added_mb", 0.54)):
        if gained := gains[metric]:
            found.append(Target(f"{metric} over PISeL's, mean", sum(gained) / len(gained), bound, False))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cicada", description=__doc__)
    parser.add_argument("--models", default=_DEFAULT, metavar="LIST", help=f"comma-separated ({_DEFAULT})")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), metavar="LIST", help=", ".join(STRATEGIES))
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="timed samples of each strategy (5)")
    parser.add_argument("--memory-runs", type=int, default=1, metavar="N", help="further samples, for memory (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows to this file")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="draw each model's timeline into this folder")
    parser.add_argument("--trace", type=int, default=0, metavar="N", help="replay N invocations of the trace, too")
    parser.add_argument("--origin", action="store_true", help="measure from origins with limits and delays, too")
    parser.add_argument("--gates", type=int, default=0, metavar="N", help="time N warm forwards with and without, too")
    parser.add_argument(
        "--checkpoints", type=Path, default=ROOT / "out" / "cicada", metavar="FOLDER", help="kept between runs"
    )
    return parser


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
