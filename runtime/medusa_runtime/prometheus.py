"""Prometheus' text format (exposition format 0.0.4): histograms, and the lines of counters and gauges."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)

Labels = tuple[tuple[str, str], ...]


class Histogram:
    """A histogram: counts of observed values, in buckets. Thread-safe.

    ``text`` is the help line, and ``bounds`` are the upper bounds of the buckets, in ascending order.
    """

    def __init__(self, name: str, text: str, bounds: tuple[float, ...], labels: Labels = ()) -> None:
        self.name = name
        self.labels = labels
        self.text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def lines(self, *others: Histogram) -> Iterable[str]:
        """Yield all lines of this histogram, and those of ``others``: of the same name, with other labels."""
        yield from _head(self.name, "histogram", self.text)
        for histogram in (self, *others):
            yield from histogram._samples()

    def _samples(self) -> Iterable[str]:
        with self._lock:
            counts, total = list(self._counts), self._sum
        seen = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), counts, strict=True):
            seen += count
            yield _sample(f"{self.name}_bucket", seen, (*self.labels, ("le", bound)))
        yield _sample(f"{self.name}_sum", total, self.labels)
        yield _sample(f"{self.name}_count", seen, self.labels)


def expiration(prefix: str, at_s: float | None) -> Iterable[str]:
    """Yield the lines of the gauge that says when the first certificate ends; none without one."""
    if at_s is not None:
        text = "When the first certificate that is shown or trusted ends, in seconds since the epoch."
        yield from gauge(f"{prefix}_certificate_expiration_timestamp_seconds", text, ((), at_s))


def gauge(name: str, text: str, *samples: tuple[Labels, float]) -> Iterable[str]:
    """Yield the lines of a gauge, or of a counter if the name ends with ``_total``."""
    yield from _head(name, "counter" if name.endswith("_total") else "gauge", text)
    for labels, value in samples:
        yield _sample(name, value, labels)


def _sample(name: str, value: float, labels: Labels = ()) -> str:
    if not labels:
        return f"{name} {value}"
    pairs = ",".join(f'{key}="{escape(text)}"' for key, text in labels)
    return f"{name}{{{pairs}}} {value}"


def escape(text: str) -> str:
    """Escape a label's value."""
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _head(name: str, kind: str, text: str) -> Iterable[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
