"""Flags that several platforms have, and their checks."""

from __future__ import annotations

import argparse

from medusa_runtime.errors import ConfigError

from . import values


def add_list(parser: argparse._ActionsContainer, flag: str, metavar: str | None, text: str = "") -> None:
    """Add a flag that may be given several times."""
    shown = f"{text}; may be repeated" if text else "may be repeated"
    parser.add_argument(flag, action="append", default=[], metavar=metavar, help=shown)


def add_labels(parser: argparse.ArgumentParser) -> None:
    """Add ``--label`` and ``--annotation``."""
    for name in ("label", "annotation"):
        add_list(parser, f"--{name}", "KEY=VALUE")


def check_scale(arguments: argparse.Namespace, most: int) -> None:
    """Raise ConfigError for an impossible ``--min-scale`` or ``--max-scale``, where 0 is no limit."""
    values.check_range(arguments.min_scale, 0, most, "--min-scale")
    values.check_range(arguments.max_scale, 0, most, "--max-scale")
    if 0 < arguments.max_scale < arguments.min_scale:
        raise ConfigError(f"--min-scale={arguments.min_scale} is above --max-scale={arguments.max_scale}")
