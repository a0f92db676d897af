"""Groups of workers on this machine: ``python -m benchmarks.pipeline``. Needs root, for the nodes' networks."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from medusa_adapters.bench.result import Result, Row, Target, targets_table
from medusa_runtime.errors import ConfigError

from benchmarks import command_line
from benchmarks.make_checkpoint import size
from benchmarks.pipeline.options import Options


class Promise(NamedTuple):
    """A row's metric that is compared with a bound, from below (``at_least``) or above."""

    module: str
    metric: str
    bound: float
    at_least: bool
    text: str


# Name → the module of this folder whose ``rows(options)`` measures it, and what was promised of it.
ROWS: dict[str, Promise] = {
    "cold": Promise("cold", "speedup_4", 3.2, True, "first token from cold, one worker over four"),
    "prediction": Promise("cold", "error_pct", 10, False, "predicted against measured first token, %"),
    "transition": Promise("consolidation", "wrong_tokens", 0, False, "tokens that a consolidation changed"),
    "consolidation": Promise("consolidation", "pause_tokens", 2, False, "pause at the switch beyond bytes/link"),
    "after": Promise("consolidation", "tpot_ratio", 1.03, False, "TPOT afterwards, over one that never was a group"),
    "burst": Promise("burst", "ttft_ratio", 1.87, True, "mean TTFT of a burst, load-then-serve over scaling up"),
    "live": Promise("live", "throughput_ratio_half", 1.7, True, "requests/s with half the layers, over the source's"),
    "zigzag": Promise("live", "ratio", 1.4, True, "worst TTFT of a burst, best effort over ZigZag"),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the medians and what was promised of them. Raises ConfigError for a bad option."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline", description=(__doc__ or "").partition(":")[0]
    )
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    result = measure(options_of(arguments))
    print(result.table())
    targets = find_targets(result)
    if targets:
        print("\n" + targets_table(targets))
    if arguments.json:
        result.write(arguments.json)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows to this file")
    parser.add_argument("--rows", default=",".join(ROWS), metavar="LIST", help=f"only these: {', '.join(ROWS)}")
    parser.add_argument("--link", type=size, default=size("50MB"), metavar="SIZE", help="payload a second; 50MB")
    parser.add_argument("--cpus", type=float, metavar="N", help="cores of each node; without, all share the machine's")
    parser.add_argument("--model", type=Path, default=Path("out/llama-57m"), metavar="FOLDER", help="out/llama-57m")
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="samples of each row; 3")
    parser.add_argument(
        "--prompt-tokens", type=int, default=512, metavar="N", help="of context at a consolidation; 512"
    )
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="that a stream gets meanwhile; 96")
    parser.add_argument("--load-s", type=float, default=60.0, metavar="S", help="how long a live target loads; 60")


def options_of(arguments: argparse.Namespace) -> Options:
    rows = tuple(name.strip() for name in arguments.rows.split(",") if name.strip())
    unknown = [name for name in rows if name not in ROWS]
    if unknown or not rows:
        raise ConfigError(f"--rows: expected names of {', '.join(ROWS)}, found {', '.join(unknown) or 'none'}")
    if arguments.runs < 1 or arguments.prompt_tokens < 2 or arguments.tokens < 8 or arguments.load_s <= 0:
        raise ConfigError("expected --runs of 1, --prompt-tokens of 2 and --tokens of 8 at least, and --load-s above 0")
    if not (arguments.model / "config.json").is_file():
        raise ConfigError(
            f"expected a checkpoint in {arguments.model}, found no config.json there; make one with "
            "python -m benchmarks.make_checkpoint --shape llama-57m --out out/llama-57m"
        )
    return Options(
        model=arguments.model.resolve(),
        rows=rows,
        link_bytes_per_s=float(arguments.link),
        cpus=arguments.cpus,
        runs=arguments.runs,
        prompt_tokens=arguments.prompt_tokens,
        tokens=arguments.tokens,
        load_s=arguments.load_s,
    )


def measure(options: Options) -> Result:
    """Have each module that a wanted row needs measure its rows, one module after the other."""
    result = Result()
    for name in dict.fromkeys(ROWS[row].module for row in options.rows):
        print(f"{name} …", file=sys.stderr, flush=True)
        module = importlib.import_module(f"benchmarks.pipeline.{name}")
        result.rows += [Row(**found) for found in module.rows(options)]
    return result


def find_targets(result: Result) -> list[Target]:
    found = []
    for name, promise in ROWS.items():
        median = result.median(name, promise.metric)
        if median is not None:
            found.append(Target(f"{name}: {promise.text}", median, promise.bound, promise.at_least))
    return found


if __name__ == "__main__":
    command_line.run(main)
