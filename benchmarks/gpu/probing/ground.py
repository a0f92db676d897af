"""What the probe's steps run on: a device, its memory at chosen addresses, and small graphs to capture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from medusa_runtime.engine.gpu.graph_pool import GraphPool
from medusa_runtime.engine.gpu.placed_memory import PlacedMemory
from medusa_runtime.state.graphs import CudaDriver, ImageStore, MemoryRange

INPUTS, OUTPUTS = "graph inputs", "graph outputs"
CHECKED_BYTES = 64 << 10  # of the outputs: what every replay is compared by


class Captured(Protocol):
    """A graph that this process has captured."""

    handle: int  # CUgraph

    def launch(self) -> None:
        """Replay it on the ground's stream."""


class Ground(Protocol):
    """A real GPU (``device.py``) or the fake driver (``fake.py``)."""

    driver: CudaDriver
    memory: PlacedMemory
    pool: GraphPool | None  # what graphs are captured in; none where none are, or where torch's own has to do
    stream: int  # CUstream
    cases: Mapping[str, Callable[[], None]]  # key → launches that a capture records; they write ``OUTPUTS``

    def prepare(self) -> None:
        """Fill weights and inputs with the same bytes in every process."""

    def capture(self, key: str) -> Captured: ...

    def ranges(self) -> list[MemoryRange]:
        """All memory that the captured graphs may point into."""

    def images(self) -> ImageStore:
        """All kernel images that were loaded so far."""

    def close(self) -> None: ...


def fixed_bytes(size: int, seed: int) -> bytes:
    """The same bytes in every process."""
    import random

    return random.Random(seed).randbytes(size)


Facts = dict[str, Any]

__all__ = ["CHECKED_BYTES", "INPUTS", "OUTPUTS", "Captured", "Facts", "Ground", "fixed_bytes"]
