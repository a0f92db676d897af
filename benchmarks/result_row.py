"""A row of a benchmark's result, as the modules of a benchmark return it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from medusa_adapters.bench.result import Row


def row(name: str, metric: str, unit: str, samples: Sequence[float]) -> dict[str, Any]:
    """Summarize samples as one row: median, least and greatest. Raises ValueError without samples."""
    return asdict(Row.of(name, metric, unit, samples))
