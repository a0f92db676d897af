"""The options of the benchmark of groups, and the form of the rows that its modules return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from medusa_adapters.bench.result import Row


@dataclass(frozen=True)
class Options:
    """``model`` is a checkpoint's folder.

    ``cpus``: cores of each node, or None for its part of nine tenths of all, of which a node has a third at most.
    ``link_bytes_per_s``: None for each row's own. ``batch_tokens``: of one step at most.
    ``warm``: processes have imported before they are told to start, as a node agent's have.
    ``engine``: torch or vllm; ``largest``: how many workers the largest group of ``cold`` has.
    """

    model: Path
    rows: tuple[str, ...]
    link_bytes_per_s: float | None = None
    cpus: float | None = None
    runs: int = 3
    prompt_tokens: int = 512
    tokens: int = 96
    warm: bool = True
    batch_tokens: int = 512
    engine: str = "torch"
    largest: int = 4

    def wants(self, name: str) -> bool:
        return name in self.rows

    def over(self, link_bytes_per_s: float) -> Options:
        """Return the options with this link, unless another one was asked for."""
        return self if self.link_bytes_per_s else replace(self, link_bytes_per_s=link_bytes_per_s)


def row(name: str, metric: str, unit: str, samples: Sequence[float]) -> dict[str, Any]:
    """Summarize samples as one row of the result. Raises ValueError without samples."""
    return asdict(Row.of(name, metric, unit, samples))
