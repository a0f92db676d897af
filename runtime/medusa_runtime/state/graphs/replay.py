"""Replay graphs with given inputs, to compare outputs bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .blueprint import Piece
from .driver import CudaDriver

Launch = Callable[[], None]
"""Launches one graph on a stream."""


class Replayer:
    """Writes inputs, launches graphs and reads outputs.

    ``at`` returns the address of a piece now, and ``stream`` is the stream of the launches.
    """

    def __init__(self, driver: CudaDriver, at: Callable[[Piece], int], stream: int) -> None:
        self._driver = driver
        self._at = at
        self._stream = stream

    def write(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            self._driver.write(self._at(piece), piece.data)

    def read(self, pieces: Iterable[Piece]) -> tuple[Piece, ...]:
        """Return the same pieces, with the bytes that are in memory now."""
        return tuple(piece._replace(data=self._driver.read(self._at(piece), len(piece.data))) for piece in pieces)

    def fill(self, piece: Piece, value: int) -> None:
        self._driver.fill(self._at(piece), value, len(piece.data))

    def run(self, launch: Launch, inputs: Iterable[Piece], outputs: Iterable[Piece]) -> tuple[Piece, ...]:
        """Replay once from these inputs, and return the outputs."""
        self.write(inputs)
        launch()
        self._driver.call("cuStreamSynchronize", self._stream)
        return self.read(outputs)
