"""Bytes a second, from counters that are read now and then."""

from __future__ import annotations

from dataclasses import dataclass

_SHORTEST_S = 0.2  # between two readings that count
_NEWEST = 0.6  # the weight of the last interval


@dataclass
class _Counter:
    at: float
    count: int
    rate: float = 0.0


class Rates:
    """The rates of named counters. A name that is not read any more is to be forgotten."""

    def __init__(self) -> None:
        self._counters: dict[str, _Counter] = {}

    def read(self, name: str, count: int, now: float) -> float:
        """Take a reading, and return the rate up to now. A counter that fell has begun anew."""
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
        """Forget all others."""
        for name in self._counters.keys() - names:
            del self._counters[name]
