"""``python -m benchmarks.cicada``: latency, memory and utilisation of cold inferences, strategy by strategy."""

from __future__ import annotations

import argparse
import signal
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from medusa_adapters.bench.result import Result, targets_table
from medusa_runtime.errors import ConfigError, MissingPackageError

from benchmarks import command_line
from benchmarks.cicada.promises import find_targets
from benchmarks.cicada.runner import ROOT
from benchmarks.cicada.session import Session, say

STRATEGIES = ("sequential", "pisel", "tetris", "optimus", "mini", "preload", "full", "converted", "floor")
_DEFAULT = "resnet50,resnet152,vgg16,vgg19,bert-base,llama-1b"
_ORIGINS_S = 90.0  # at most, of each model: one of gigabytes has fewer samples
_GATED = "resnet50"  # what gates cost is promised of it


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    from benchmarks.cicada.workloads.checkpoint import checkpoint, converted
    from benchmarks.cicada.workloads.workload import NAMES, workload

    models = command_line.names("--models", options.models, NAMES)
    strategies = command_line.names("--strategies", options.strategies, STRATEGIES)
    if options.runs < 1:
        raise ConfigError(f"--runs: expected 1 or more, found {options.runs}")
    _require("numpy", "safetensors", *["matplotlib"] * bool(options.figures))
    result = Result()
    folders = {model: checkpoint(workload(model), options.checkpoints) for model in models}
    for folder in folders.values() if "converted" in strategies or options.prepare else ():
        converted(folder)
    if options.prepare:
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # nothing stays behind
    with tempfile.TemporaryDirectory(prefix="medusa-cicada-") as scratch:
        session = Session(folders, strategies, Path(scratch), options.minutes)
        _measure(result, session, folders, options, Path(scratch))
        if options.trace:
            from benchmarks.cicada.replay import replay

            replay(result, folders, strategies, options.trace, Path(scratch))
        print(result.table())
        print("\nverdict, found, promised\n" + targets_table(find_targets(result, models)), flush=True)
        if options.json:
            result.write(options.json)
        if options.figures:
            session.draw(options.figures)
    return 0


def _measure(
    result: Result, session: Session, folders: Mapping[str, Path], options: argparse.Namespace, scratch: Path
) -> None:
    """Each kind of figure once, then more samples of the first kind while there is time."""
    session.round(0)
    for number in range(options.memory_runs):
        session.round(number, watch=True)
    if options.gates:
        from benchmarks.cicada.gates import measure_gates

        model = _GATED if _GATED in folders else next(iter(folders))
        measure_gates(result, model, folders[model], options.gates)
    if options.origin:
        from benchmarks.cicada.limited import measure_limited, seconds_needed

        for model in folders:
            each_s = seconds_needed(model, options.checkpoints, 1)
            runs = min(options.origin, int(min(session.left_s, _ORIGINS_S) / each_s))
            if runs:
                measure_limited(result, model, options.checkpoints, runs, scratch)
            else:
                say(f"{model}: the limited origins are left out, the time is over")
    for number in range(1, options.runs):
        session.round(number)
    session.add_rows(result)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cicada", description=__doc__)
    parser.add_argument("--models", default=_DEFAULT, metavar="LIST", help=f"comma-separated ({_DEFAULT})")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), metavar="LIST", help=", ".join(STRATEGIES))
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="most timed samples of each strategy (5)")
    parser.add_argument(
        "--minutes",
        type=float,
        default=12.0,
        metavar="N",
        help="begin nothing that would end later than this (12)",
    )
    parser.add_argument("--memory-runs", type=int, default=1, metavar="N", help="further samples, for memory (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows to this file")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="draw each model's timeline into this folder")
    parser.add_argument("--trace", type=int, default=0, metavar="N", help="replay N invocations of the trace, too")
    parser.add_argument("--origin", type=int, default=3, metavar="N", help="samples from limited and late origins (3)")
    parser.add_argument("--gates", type=int, default=100, metavar="N", help="warm forwards, built and plain (100)")
    parser.add_argument("--prepare", action="store_true", help="only write the checkpoints, several gigabytes")
    parser.add_argument(
        "--checkpoints", type=Path, default=ROOT / "out" / "cicada", metavar="FOLDER", help="kept between runs"
    )
    return parser


def _require(*packages: str) -> None:
    """Raise MissingPackageError before anything is measured, which takes minutes."""
    if absent := [name for name in packages if find_spec(name) is None]:
        raise MissingPackageError(f"packages are missing: pip install {' '.join(absent)}")


if __name__ == "__main__":
    command_line.run(main)
