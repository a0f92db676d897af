"""The counters and histograms of the worker process, for ``/metrics``."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from medusa_runtime.prometheus import SECONDS, TOKEN_SECONDS, Histogram, gauge


class Metrics:
    """The counters and histograms of the worker process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, int], int] = {}
        self.ttft = Histogram(
            "medusa_time_to_first_token_seconds",
            "Seconds from a request's arrival to its first generated token.",
            SECONDS,
        )
        self.tpot = Histogram(
            "medusa_time_per_output_token_seconds",
            "Mean seconds between a request's generated tokens after the first.",
            TOKEN_SECONDS,
        )
        self.e2e = Histogram(
            "medusa_request_seconds", "Seconds from a request's arrival to the end of its answer.", SECONDS
        )

    def count_request(self, route: str, status: int) -> None:
        with self._lock:
            self._requests[route, status] = self._requests.get((route, status), 0) + 1

    def generated(self, first_s: float, total_s: float, tokens: int) -> None:
        """Record a generation that has ended: the seconds to its first token and to its end, and its tokens."""
        self.ttft.observe(first_s)
        if tokens > 1:
            self.tpot.observe((total_s - first_s) / (tokens - 1))

    def lines(self) -> Iterable[str]:
        with self._lock:
            requests = sorted(self._requests.items())
        yield from gauge(
            "medusa_requests_total",
            "Requests answered, by route and HTTP status; 499: the client left.",
            *(((("route", route), ("status", str(status))), count) for (route, status), count in requests),
        )
        for histogram in (self.ttft, self.tpot, self.e2e):
            yield from histogram.lines()
