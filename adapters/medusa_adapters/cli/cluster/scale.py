"""`medusa cluster scale`: change how many instances a model may have."""

from __future__ import annotations

import argparse

from medusa_runtime.errors import ConfigError

from .connection import add_connection, ask


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="a deployed model's")
    parser.add_argument("--min", type=int, metavar="N", help="instances that always run")
    parser.add_argument("--max", type=int, metavar="N", help="instances at most")
    add_connection(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.min is None and arguments.max is None:
        raise ConfigError("expected --min, --max, or both")
    found = ask(arguments, "scale", {"name": arguments.name, "min": arguments.min, "max": arguments.max})
    print(f"{found['name']} may have {found['min']} to {found['max']} instances")
    return 0
