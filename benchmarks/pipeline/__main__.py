"""Measure groups of workers on this machine: ``python -m benchmarks.pipeline``. Needs root, for the nodes' networks."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from medusa_runtime.errors import ConfigError

from benchmarks import command_line
from benchmarks.make_checkpoint import main as make_checkpoint
from benchmarks.make_checkpoint import size
from benchmarks.pipeline.options import Options
from benchmarks.promised import Promise, check_checkpoint, chosen_rows, report

MODEL = Path("out/llama-55m")
# For each row, the module of this folder whose ``rows(options)`` measures it, and the promise about it.
ROWS: dict[str, Promise] = {
    "cold": Promise("cold", "speedup_4", 3.2, True, "first token from cold, one worker over four"),
    "prediction": Promise("cold", "error_pct", 10, False, "predicted against measured first token, %"),
    "transition": Promise("consolidation", "wrong_tokens", 0, False, "tokens that a consolidation changed"),
    "consolidation": Promise("consolidation", "pause_tokens", 2, False, "pause at the switch beyond bytes/link"),
    "after": Promise("consolidation", "tpot_ratio", 1.03, False, "TPOT afterwards, over one that never was a group"),
    "burst": Promise("burst", "ttft_ratio", 1.87, True, "mean TTFT of a burst, load-then-serve over scaling up"),
    "live": Promise("live", "throughput_ratio_half", 1.7, True, "requests/s with half the layers, over the source's"),
    "zigzag": Promise("live", "ratio", 1.4, True, "worst TTFT of a burst, best effort over ZigZag"),
    "disaggregation": Promise("disaggregation", "ttft_p99_ratio", 1.0, True, "p99 TTFT, without over with pre-scaling"),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Print the medians, and what was promised of them. Raises ConfigError for a bad option."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pipeline", description=(__doc__ or "").partition(":")[0]
    )
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    options = options_of(arguments)
    if arguments.figures:
        draw(options, arguments.figures)
    else:
        report("benchmarks.pipeline", ROWS, options, arguments)
    return 0


def draw(options: Options, folder: Path) -> None:
    """Draw the papers' figures that belong to the wanted rows, and print their tables."""
    from benchmarks.pipeline.figures import FIGURES

    folder.mkdir(parents=True, exist_ok=True)
    for name in (name for name in FIGURES if options.wants(name)):
        figure = FIGURES[name](options)
        figure.write(folder)
        print(figure.table(), flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows to this file")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="draw the papers' figures of the rows, instead")
    parser.add_argument("--rows", default=",".join(ROWS), metavar="LIST", help=f"only these: {', '.join(ROWS)}")
    parser.add_argument("--link", type=size, metavar="SIZE", help="payload a second; each row has its own")
    parser.add_argument(
        "--cpus", type=float, metavar="N", help="cores of each node; its part of nine tenths of all, a third at most"
    )
    parser.add_argument(
        "--model", type=Path, default=MODEL, metavar="FOLDER", help=f"{MODEL}, made where it is not there"
    )
    parser.add_argument("--runs", type=int, default=3, metavar="N", help="samples of each row; 3")
    parser.add_argument(
        "--prompt-tokens", type=int, default=512, metavar="N", help="of context at a consolidation; 512"
    )
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="that a stream gets meanwhile; 96")
    parser.add_argument("--engine", choices=("torch", "vllm"), default="torch", help="of the rows cold and prediction")
    parser.add_argument("--largest", type=int, default=4, metavar="N", help="workers in these rows; 4")
    parser.add_argument("--imports", action="store_true", help="count imports, too; without, processes are warm")


def options_of(arguments: argparse.Namespace) -> Options:
    rows = chosen_rows(arguments.rows, ROWS)
    if arguments.runs < 1 or arguments.prompt_tokens < 2 or arguments.tokens < 8:
        raise ConfigError("expected --runs of 1, --prompt-tokens of 2 and --tokens of 8 at least")
    if arguments.largest < 1:
        raise ConfigError(f"expected --largest of 1 worker at least, found {arguments.largest}")
    if arguments.model == MODEL and not MODEL.exists():
        make_checkpoint(["--shape", MODEL.name, "--out", str(MODEL)])
    check_checkpoint(arguments.model)
    return Options(
        model=arguments.model.resolve(),
        rows=rows,
        link_bytes_per_s=arguments.link,
        cpus=arguments.cpus,
        runs=arguments.runs,
        prompt_tokens=arguments.prompt_tokens,
        tokens=arguments.tokens,
        warm=not arguments.imports,
        engine=arguments.engine,
        largest=arguments.largest,
    )


if __name__ == "__main__":
    command_line.run(main)
