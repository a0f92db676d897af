"""Rates in bytes a second, from counters that are read now and then."""

from __future__ import annotations

from dataclasses import dataclass

_SHORTEST_S = 0.2  # the shortest interval from which a rate is computed
_NEWEST = 0.6  # the weight of the last interval in the moving average


@dataclass
class _Counter:
    at: float
    count: int
    rate: float = 0.0


class Rates:
    """The rates of named counters. Names that are no longer read have to be dropped with ``keep``."""

    def __init__(self) -> None:
        self._counters: dict[str, _Counter] = {}

    def read(self, name: str, count: int, now: float) -> float:
        """Record a counter's value, and return its rate per second. If the counter fell, its rate begins anew at 0.

        ``now`` is in seconds, by any steady clock.
        """
        known = self._counters.get(name)
        if known is None or count < known.count:
            self._counters[name] = _Counter(now, count)
            return 0.0
        if (seconds := now - known.at) >= _SHORTEST_S:
            newest = (count - known.count) / seconds
            known.rate = newest if not known.rate else _NEWEST * newest + (1 - _NEWEST) * known.rate
            known.at, known.count = now, count
            if known.rate < 1:
                known.rate = 0.0
        return known.rate

    def keep(self, names: set[str]) -> None:
        """Forget all counters but these."""
        for name in self._counters.keys() - names:
            del self._counters[name]
