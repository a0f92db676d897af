"""`medusa bench`: what a user measures of their own model, one module for each benchmark."""

from __future__ import annotations

import argparse
import importlib
import signal

_BENCHES = (
    ("coldstart", "medusa_adapters.bench.coldstart", "from nothing running to the first token"),
    ("fetch", "medusa_adapters.bench.fetch", "a checkpoint from its store into memory"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure a model of yours on this machine, with real processes."
    benches = parser.add_subparsers(metavar="benchmark", required=True)
    for name, module, text in _BENCHES:
        bench = benches.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        bench.set_defaults(bench=module)
        importlib.import_module(module).add_arguments(bench)


def run(arguments: argparse.Namespace) -> int:
    # As Ctrl-C does it: through the context managers that end what was started and remove what was written.
    signal.signal(signal.SIGTERM, _stop)
    status: int = importlib.import_module(arguments.bench).run(arguments)
    return status


def _stop(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)
