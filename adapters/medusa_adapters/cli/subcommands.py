"""Commands with commands of their own: `medusa bench`, `medusa cluster`, `medusa deploy`."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

# Name, module with ``add_arguments(parser)`` and ``run(arguments) -> int``, and a line of help.
Subcommand = tuple[str, str, str]


def add_subcommands(parser: argparse.ArgumentParser, subcommands: Sequence[Subcommand], *, metavar: str) -> None:
    """Give a command these subcommands; ``metavar`` is the word for one of them in the help."""
    parsers = parser.add_subparsers(metavar=metavar, required=True)
    for name, module, text in subcommands:
        subcommand = parsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        subcommand.set_defaults(subcommand=module)
        importlib.import_module(module).add_arguments(subcommand)


def run_subcommand(arguments: argparse.Namespace) -> int:
    """Run the subcommand that was chosen; returns its exit status."""
    status: int = importlib.import_module(arguments.subcommand).run(arguments)
    return status
