"""The options of the cluster benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """The options of a run: the laboratory's nodes and links, the models, and the rows to measure.

    ``model`` is a checkpoint's folder. A module that compares sizes also takes ``large_model``, if there is one.
    ``link_bytes_per_s`` is the payload that a link carries. ``cpus`` is the number of cores of each node, or None
    without a limit. ``runs`` is the number of samples of each row. With ``tls``, weights travel encrypted.
    """

    model: Path
    rows: tuple[str, ...]
    nodes: int = 8
    link_bytes_per_s: float = 50e6
    cpus: float | None = None
    runs: int = 5
    tls: bool = False
    large_model: Path | None = None

    def wants(self, name: str) -> bool:
        return name in self.rows
