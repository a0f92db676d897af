"""What the process of each part of the check does first, whichever engine it is about."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import signal
from collections.abc import Iterable
from pathlib import Path

from benchmarks.gpu.kernels import build_kernels


def part_parser(description: str | None, names: Iterable[str]) -> argparse.ArgumentParser:
    """Return a parser with the options that all parts have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("name", choices=sorted(names))
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="", help="a checkpoint's folder")
    return parser


def prepare(log_format: str = "%(message)s") -> None:
    """Make this process log, show tracebacks when it is ended from outside, and have the kernels."""
    logging.basicConfig(level=logging.INFO, format=log_format)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # sent to a part that takes too long
    build_kernels()
