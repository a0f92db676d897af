"""Counters, gauges and histograms in Prometheus' text format (exposition format 0.0.4)."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterable

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)

Labels = tuple[tuple[str, str], ...]


class Histogram:
    """Observations in buckets."""

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
        """All of this one's lines, and those of ``others`` of this name, which have other labels."""
        yield from _head(self.name, "histogram", self.text)
        for histogram in (self, *others):
            yield from histogram._samples()

    def _samples(self) -> Iterable[str]:
        with self._lock:
            counts, total = list(self._counts), self._sum
        seen = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), counts, strict=True):
            seen += count
            yield sample(f"{self.name}_bucket", seen, (*self.labels, ("le", bound)))
        yield sample(f"{self.name}_sum", total, self.labels)
        yield sample(f"{self.name}_count", seen, self.labels)


class Metrics:
    """The counters and histograms of the worker process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, int], int] = {}
        self.ttft = Histogram(
            "medusa_time_to_first_token_seconds",
            "Seconds from a request's arrival to its first generated token.",
            _SECONDS,
        )
        self.tpot = Histogram(
            "medusa_time_per_output_token_seconds",
            "Mean seconds between a request's generated tokens after the first.",
            _TOKEN_SECONDS,
        )
        self.e2e = Histogram(
            "medusa_request_seconds", "Seconds from a request's arrival to the end of its answer.", _SECONDS
        )

    def count_request(self, route: str, status: int) -> None:
        with self._lock:
            self._requests[route, status] = self._requests.get((route, status), 0) + 1

    def generated(self, first_s: float, total_s: float, tokens: int) -> None:
        """One generation ended: seconds to its first token and to its end."""
        self.ttft.observe(first_s)
        if tokens > 1:
            self.tpot.observe((total_s - first_s) / (tokens - 1))

    def lines(self) -> Iterable[str]:
        yield from _head(
            "medusa_requests_total", "counter", "Requests answered, by route and HTTP status; 499: the client left."
        )
        with self._lock:
            requests = sorted(self._requests.items())
        for (route, status), count in requests:
            yield sample("medusa_requests_total", count, (("route", route), ("status", str(status))))
        for histogram in (self.ttft, self.tpot, self.e2e):
            yield from histogram.lines()


def gauge(name: str, text: str, *samples: tuple[Labels, float]) -> Iterable[str]:
    """A gauge's lines."""
    yield from _head(name, "counter" if name.endswith("_total") else "gauge", text)
    for labels, value in samples:
        yield sample(name, value, labels)


def sample(name: str, value: float, labels: Labels = ()) -> str:
    if not labels:
        return f"{name} {value}"
    pairs = ",".join(f'{key}="{escape(text)}"' for key, text in labels)
    return f"{name}{{{pairs}}} {value}"


def escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _head(name: str, kind: str, text: str) -> Iterable[str]:
    yield f"# HELP {name} {text}"
    yield f"# TYPE {name} {kind}"
