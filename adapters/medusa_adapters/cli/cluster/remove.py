"""`medusa cluster remove`: end a model's instances after their requests, and forget it."""

from __future__ import annotations

import argparse

from .connection import add_connection, ask


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a deployed model's")
    add_connection(parser)


def run(arguments: argparse.Namespace) -> int:
    ask(arguments, "remove", {"name": arguments.name})
    print(f"removed {arguments.name}")
    return 0
