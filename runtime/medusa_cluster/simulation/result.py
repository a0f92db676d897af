"""The result of a simulation: the latencies of each request, and the cluster's costs."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """Requests in the order in which they came, and sums over the run. Without an answer, times are infinite."""

    strategy: str
    at_s: array[float] = field(default_factory=lambda: array("d"))
    model: array[int] = field(default_factory=lambda: array("l"))
    ttft_s: array[float] = field(default_factory=lambda: array("d"))
    tpot_s: array[float] = field(default_factory=lambda: array("d"))
    ended: int = 0  # requests whose last token has come
    queued_s: float = 0.0  # of these, until an instance took them
    prefill_s: float = 0.0  # of these, from the begin of the prefill to the first token
    device_s: float = 0.0  # devices × seconds
    seconds: float = 0.0
    cold_starts: int = 0
    resumed: int = 0  # instances that were to end, and went on
    fetches: int = 0  # of weights, from other nodes
    relieved: int = 0  # starts that relieved another instance
    moved_bytes: float = 0.0
    store_bytes: float = 0.0
    held_byte_s: float = 0.0  # weights kept for later in host memory × seconds
    largest_backlog: int = 0
    ticks: int = 0
    decide_s: float = 0.0  # of the processor
    decisions: int = 0
    instances: list[tuple[float, int]] = field(default_factory=list)  # (time, how many) at each change
    ready: list[tuple[float, int]] = field(default_factory=list)  # the same of those that serve
    roles_s: dict[str, float] = field(default_factory=dict)  # device seconds by role and state: "prefill ready"
    served: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens), where it was asked for

    @property
    def requests(self) -> int:
        return len(self.ttft_s)

    def add(self, at_s: float, model: int) -> None:
        """Note a request that has come; it has no answer yet."""
        self.at_s.append(at_s)
        self.model.append(model)
        self.ttft_s.append(math.inf)
        self.tpot_s.append(math.inf)

    def end(self, number: int, ttft_s: float, tpot_s: float) -> None:
        """Note the answer to a request."""
        self.ended += 1
        self.ttft_s[number], self.tpot_s[number] = ttft_s, tpot_s

    def attainment(self, ttft_slo_s: Callable[[int], float], tpot_slo_s: Callable[[int], float] | None = None) -> float:
        """Return the part of the requests that met their model's SLO: of the first token, or of the others."""
        if not self.requests:
            return 1.0
        if tpot_slo_s is not None:
            met = sum(tpot <= tpot_slo_s(model) for tpot, model in zip(self.tpot_s, self.model, strict=True))
        else:
            met = sum(ttft <= ttft_slo_s(model) for ttft, model in zip(self.ttft_s, self.model, strict=True))
        return met / self.requests

    def mean_ttft_s(self) -> float:
        return mean([ttft for ttft in self.ttft_s if math.isfinite(ttft)])

    def mean_tpot_s(self) -> float:
        return mean([tpot for tpot in self.tpot_s if math.isfinite(tpot)])


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def percentile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that ``part`` of them do not exceed."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(max(math.ceil(part * len(ordered)) - 1, 0), len(ordered) - 1)]
