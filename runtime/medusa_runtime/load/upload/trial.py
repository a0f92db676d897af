"""Trying two ways of copying on a load's first bytes, and keeping the faster one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

logger = logging.getLogger(__name__)

TRIAL_BYTES = 1 << 30


class Trial:
    """Compares ways of copying by how long each keeps the copying thread busy; the device works in the background.

    Each way gets an equal share of the first ``total_bytes``, by turns. Belongs to one thread.
    """

    def __init__(self, ways: Sequence[str], total_bytes: int = TRIAL_BYTES) -> None:
        self._share = total_bytes // len(ways)
        self._bytes = dict.fromkeys(ways, 0)
        self._seconds = dict.fromkeys(ways, 0.0)
        self.chosen: str | None = None

    def next(self) -> str:
        """Return the way to use for the next tensor."""
        return self.chosen or min(self._bytes, key=lambda way: self._bytes[way])

    def give_up(self, way: str) -> None:
        """Remove a way that cannot be used here."""
        del self._bytes[way], self._seconds[way]
        if len(self._bytes) == 1:
            (self.chosen,) = self._bytes

    @contextmanager
    def timed(self, way: str, size_bytes: int) -> Iterator[None]:
        """Count the copy that is made in this context."""
        began = perf_counter()
        yield
        if self.chosen is None and way in self._bytes:
            self._bytes[way] += size_bytes
            self._seconds[way] += perf_counter() - began
            if all(count >= self._share for count in self._bytes.values()):
                self._choose()

    def _choose(self) -> None:
        rates = {way: self._bytes[way] / max(self._seconds[way], 1e-9) / 1e9 for way in self._bytes}
        self.chosen = max(rates, key=lambda way: rates[way])
        told = ", ".join(f"{way} {rate:.1f} GB/s" for way, rate in rates.items())
        logger.info("weights go to the device by %s from now on: of the loader's time, %s", self.chosen, told)


__all__ = ["TRIAL_BYTES", "Trial"]
