"""The options of the benchmark of groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """The options of a run.

    ``model`` is a checkpoint's folder. ``link_bytes_per_s`` is the payload of a link, or None for each row's own.
    ``cpus`` is the number of cores of each node. By default, nodes share nine tenths of the machine, and each has at
    most a third of that. ``prompt_tokens`` and ``tokens`` are the context at a consolidation, and the tokens that a
    stream gets meanwhile. With ``warm``, processes have imported everything before they start, like those of a node
    agent. ``batch_tokens`` is the most tokens of one step. ``engine`` is "torch" or "vllm", and ``largest`` the number
    of workers in the largest group of the row ``cold``.
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
        """Return the options with this link, unless they already name one."""
        return self if self.link_bytes_per_s else replace(self, link_bytes_per_s=link_bytes_per_s)
