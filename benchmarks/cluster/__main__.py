"""Measure copies, starts and decisions of a cluster on this machine: ``python -m benchmarks.cluster``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from medusa_runtime.errors import ConfigError

from benchmarks import command_line
from benchmarks.cluster.options import Options
from benchmarks.make_checkpoint import size
from benchmarks.promised import Promise, check_checkpoint, chosen_rows, report

# For each row, the module of this folder whose ``rows(options)`` measures it, and the promise about it.
ROWS: dict[str, Promise] = {
    "chain": Promise("chain", "ratio_8_to_2", 1.10, False, "1 -> 8 copies by a chain, over the time for 1 -> 2"),
    "origin": Promise("chain", "sent_ratio", 1.05, False, "bytes the origin sends for all copies, over the model's"),
    "hop": Promise("chain", "link_share", 0.95, True, "rate of a chain's hop, over its link's"),
    "floor": Promise("chain", "ratio_over_floor", 1.10, False, "that ratio, over the one of bare relays"),
    "forwarding": Promise("forwarding", "tpot_p99_ratio", 1.10, False, "p99 TPOT, forwarding over not forwarding"),
    "live": Promise("live", "throughput_ratio", 1.2, True, "requests while a second instance loads, helping over not"),
    "apart": Promise("apart", "gap_p99_ratio", 1.0, True, "p99 between tokens beside prompts, together over apart"),
    "zero_to_one": Promise("zero_to_one", "added_ms", 60, False, "ms that the cluster adds to the first token"),
    "planner": Promise("decisions", "ms", 40, False, "ms to plan for 80 layers and 1,000 devices"),
    "decisions": Promise("decisions", "ms", 100, False, "ms of the slowest decision for 10,000 nodes and 1,000 models"),
    "crowded": Promise("decisions", "ms", 1000, False, "ms to decide where 10,000 nodes are full and 300 models wait"),
    "redeploy": Promise("redeploy", "lost", 0, False, "requests lost while a model is deployed again"),
    "turns": Promise("turns", "found", 0.7, True, "tokens of chats' further turns that their instances had"),
    "burst": Promise("burst", "lost", 0, False, "requests lost while instances go 1 -> N -> 1"),
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Print the medians, and what was promised of them. Raises ConfigError for a bad option."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=(__doc__ or "").partition(":")[0])
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    report("benchmarks.cluster", ROWS, options_of(arguments), arguments)
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and rows to this file")
    parser.add_argument("--rows", default=",".join(ROWS), metavar="LIST", help=f"only these: {', '.join(ROWS)}")
    parser.add_argument("--nodes", type=int, default=8, metavar="N", help="nodes of the laboratory; 8")
    parser.add_argument("--link", type=size, default=size("50MB"), metavar="SIZE", help="payload a second; 50MB")
    parser.add_argument("--cpus", type=float, metavar="N", help="cores of each node; without, all share the machine's")
    parser.add_argument("--model", type=Path, default=Path("out/llama-57m"), metavar="FOLDER", help="out/llama-57m")
    parser.add_argument("--large-model", type=Path, metavar="FOLDER", help="a second one, for rows that compare sizes")
    parser.add_argument("--tls", action="store_true", help="chain, origin, hop, forwarding: encrypt the weights")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="samples of each row; 5")


def options_of(arguments: argparse.Namespace) -> Options:
    rows = chosen_rows(arguments.rows, ROWS)
    if arguments.nodes < 2 or arguments.runs < 1:
        raise ConfigError(
            f"expected --nodes of 2 and --runs of 1 at least, found {arguments.nodes} and {arguments.runs}"
        )
    needing = [row for row in rows if ROWS[row].module != "decisions"]  # those decide, and load nothing
    for folder in (arguments.model, arguments.large_model):
        if folder is not None and needing:
            check_checkpoint(folder)
    return Options(
        model=arguments.model.resolve(),
        rows=rows,
        nodes=arguments.nodes,
        link_bytes_per_s=float(arguments.link),
        cpus=arguments.cpus,
        runs=arguments.runs,
        tls=arguments.tls,
        large_model=arguments.large_model.resolve() if arguments.large_model else None,
    )


if __name__ == "__main__":
    command_line.run(main)
