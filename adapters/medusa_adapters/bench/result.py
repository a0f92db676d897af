"""The common form of a benchmark's result: facts of the machine, and one row per name and metric."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Row:
    """The median and range of one contestant's samples of one metric, in ``unit``."""

    name: str
    metric: str
    unit: str
    median: float
    min: float
    max: float
    runs: int

    @classmethod
    def of(cls, name: str, metric: str, unit: str, samples: Sequence[float]) -> Row:
        """Summarize samples. Raises ValueError without any: a contestant that gave none has no row."""
        if not samples:
            raise ValueError(f"no samples of {metric} for {name}")
        return cls(name, metric, unit, statistics.median(samples), min(samples), max(samples), len(samples))


class Target(NamedTuple):
    """A ratio of two medians and its bound, which is a lower one (``at_least``) or an upper one."""

    text: str
    ratio: float
    bound: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.ratio >= self.bound if self.at_least else self.ratio <= self.bound


@dataclass
class Result:
    """Rows in the order they are to be shown, with the machine they were measured on."""

    machine: dict[str, str | int | float] = field(default_factory=lambda: machine_facts())
    rows: list[Row] = field(default_factory=list)

    def add(self, name: str, metric: str, unit: str, samples: Sequence[float]) -> None:
        if samples:
            self.rows.append(Row.of(name, metric, unit, samples))

    def median(self, name: str, metric: str) -> float | None:
        return next((row.median for row in self.rows if row.name == name and row.metric == metric), None)

    def ratio(self, metric: str, name: str, other: str) -> float | None:
        """Return the median of ``name`` over the median of ``other``; None if one of them was not measured."""
        ours, theirs = self.median(name, metric), self.median(other, metric)
        return None if ours is None or not theirs else ours / theirs

    def to_json(self) -> str:
        return json.dumps({"machine": self.machine, "rows": [asdict(row) for row in self.rows]}, indent=2) + "\n"

    def write(self, path: Path) -> None:
        path.write_text(self.to_json())

    def table(self) -> str:
        """Return the rows as text with aligned columns. The first line describes the machine."""
        head = ("name", "metric", "median", "min", "max", "unit", "runs")
        cells = [
            (r.name, r.metric, _number(r.median), _number(r.min), _number(r.max), r.unit, str(r.runs))
            for r in self.rows
        ]
        widths = [max(len(line[i]) for line in (head, *cells)) for i in range(len(head))]
        facts = ", ".join(f"{key} {value}" for key, value in self.machine.items())
        return "\n".join([facts, _line(head, widths), *(_line(line, widths) for line in cells)])


def targets_table(targets: Iterable[Target]) -> str:
    """Return one line per target: whether it is met, the ratio, and the bound."""
    return "\n".join(
        f"{'met   ' if t.met else 'MISSED'}  {t.ratio:6.2f}  {'>=' if t.at_least else '<='} {t.bound:g}  {t.text}"
        for t in targets
    )


def machine_facts() -> dict[str, str | int | float]:
    """Return CPU model, usable cores, memory, kernel and Python: nothing that names the machine or its owner."""
    return {
        "cpu": _field_of("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _field_of(path: str, key: str) -> str | None:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(
        cell.rjust(width) if 2 <= i <= 4 else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ).rstrip()
