"""Trying two methods of copying on a load's first bytes, and keeping the faster one."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

logger = logging.getLogger(__name__)

TRIAL_BYTES = 1 << 30


class Trial:
    """Compares methods of copying by how long each keeps the copying thread busy; the device works in the background.

    Each method gets an equal share of the first ``total_bytes``, by turns. Belongs to one thread.
    """

    def __init__(self, methods: Sequence[str], total_bytes: int = TRIAL_BYTES) -> None:
        self._share = total_bytes // len(methods)
        self._bytes = dict.fromkeys(methods, 0)
        self._seconds = dict.fromkeys(methods, 0.0)
        self.chosen: str | None = None

    def next(self) -> str:
        """Return the method to use for the next tensor."""
        return self.chosen or min(self._bytes, key=lambda method: self._bytes[method])

    def give_up(self, method: str) -> None:
        """Remove a method that cannot be used here."""
        del self._bytes[method], self._seconds[method]
        if len(self._bytes) == 1:
            (self.chosen,) = self._bytes

    @contextmanager
    def timed(self, method: str, size_bytes: int) -> Iterator[None]:
        """Count the copy that is made in this context."""
        began = perf_counter()
        yield
        if self.chosen is None and method in self._bytes:
            self._bytes[method] += size_bytes
            self._seconds[method] += perf_counter() - began
            if all(count >= self._share for count in self._bytes.values()):
                self._choose()

    def _choose(self) -> None:
        rates = {method: self._bytes[method] / max(self._seconds[method], 1e-9) / 1e9 for method in self._bytes}
        self.chosen = max(rates, key=lambda method: rates[method])
        speeds = ", ".join(f"{method} {rate:.1f} GB/s" for method, rate in rates.items())
        logger.info("weights go to the device by %s from now on: of the loader's time, %s", self.chosen, speeds)


__all__ = ["TRIAL_BYTES", "Trial"]
