"""Benchmarks whose rows have promised bounds. Each row is measured by a module of the benchmark's folder."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from medusa_adapters.bench.result import Result, Row, Target, targets_table
from medusa_runtime.errors import ConfigError

from benchmarks import command_line


class Promise(NamedTuple):
    """The promise that a row's metric is at least (``at_least``) or at most its bound.

    ``module`` is the one in the benchmark's folder whose ``rows(options)`` measures it.
    """

    module: str
    metric: str
    bound: float
    at_least: bool
    text: str


class Options(Protocol):
    """The options of a benchmark that the modules of its rows read."""

    @property
    def rows(self) -> tuple[str, ...]:
        """The names of the rows to measure."""


def chosen_rows(text: str, promises: Mapping[str, Promise]) -> tuple[str, ...]:
    """Parse the value of ``--rows``. Raises ConfigError for an unknown name, or if there is none."""
    rows = command_line.names("--rows", text, promises)
    if not rows:
        raise ConfigError(f"--rows: expected names of {', '.join(promises)}, found none")
    return rows


def check_checkpoint(folder: Path) -> None:
    """Raise ConfigError if the folder has no checkpoint."""
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"expected a checkpoint in {folder}, found no config.json there; make one with "
            "python -m benchmarks.make_checkpoint --shape llama-57m --out out/llama-57m"
        )


def report(package: str, promises: Mapping[str, Promise], options: Options, arguments: argparse.Namespace) -> None:
    """Measure the wanted rows, print their medians and what was promised of them, and write ``--json``."""
    result = _measure(package, promises, options)
    print(result.table())
    targets = _targets(promises, result)
    if targets:
        print("\n" + targets_table(targets))
    if arguments.json:
        result.write(arguments.json)


def _measure(package: str, promises: Mapping[str, Promise], options: Options) -> Result:
    """Run the modules that measure the wanted rows, one after another."""
    result = Result()
    for name in dict.fromkeys(promises[row].module for row in options.rows):
        print(f"{name} …", file=sys.stderr, flush=True)
        module: Any = importlib.import_module(f"{package}.{name}")
        result.rows += [Row(**found) for found in module.rows(options)]
    return result


def _targets(promises: Mapping[str, Promise], result: Result) -> list[Target]:
    found = []
    for name, promise in promises.items():
        median = result.median(name, promise.metric)
        if median is not None:
            found.append(Target(f"{name}: {promise.text}", median, promise.bound, promise.at_least))
    return found
