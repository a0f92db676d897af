"""`medusa bench`: what a user measures of their own model, one module for each benchmark."""

from __future__ import annotations

import argparse
import signal

from ..cli.subcommands import add_subcommands, run_subcommand

_BENCHES = (
    ("coldstart", "medusa_adapters.bench.coldstart.command", "from nothing running to the first token"),
    ("fetch", "medusa_adapters.bench.fetch", "a checkpoint from its store into memory"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure a model of yours on this machine, with real processes."
    add_subcommands(parser, _BENCHES, metavar="benchmark")


def run(arguments: argparse.Namespace) -> int:
    # End as at Ctrl-C: through the context managers, which end processes and remove files.
    signal.signal(signal.SIGTERM, _stop)
    return run_subcommand(arguments)


def _stop(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)
