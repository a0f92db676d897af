"""The options of the cluster benchmark, and the format of the rows that its modules return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from medusa_adapters.bench.result import Row


@dataclass(frozen=True)
class Options:
    """The options of a run: the laboratory's nodes and links, the models, and the rows to measure.

    ``model`` is a checkpoint's folder. A module that compares sizes also takes ``large_model``, if there is one.
    ``link_bytes_per_s`` is the payload that a link carries. ``cpus`` is the number of cores of each node, or None
    without a limit. ``runs`` is the number of samples of each row.
    """

    model: Path
    rows: tuple[str, ...]
    nodes: int = 8
    link_bytes_per_s: float = 50e6
    cpus: float | None = None
    runs: int = 5
    large_model: Path | None = None

    def wants(self, name: str) -> bool:
        return name in self.rows


def row(name: str, metric: str, unit: str, samples: Sequence[float]) -> dict[str, Any]:
    """Summarize samples as one row of the result: median, least and greatest. Raises ValueError without samples."""
    return asdict(Row.of(name, metric, unit, samples))
