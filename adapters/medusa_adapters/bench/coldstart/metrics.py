"""The metrics of a cold-start benchmark. Tables, JSON, the report and docs/benchmarks/starts.md share their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..result import Result


class Metric(NamedTuple):
    unit: str
    title: str
    meaning: str = ""


METRICS = {
    "ttft_s": Metric(
        "s",
        "Time to the first token",
        "from exec of a fresh process to the first token at the client; less is better",
    ),
    "ready_s": Metric("s", "Time until ready", "from exec to the first 200 of /readyz"),
    "pss_mb": Metric("MB", "Memory", "proportional set size of all processes after the first answer"),
    "rss_mb": Metric("MB", "Resident sets", "summed over all processes; shared pages count once for each"),
    "gap_ms": Metric("ms", "Unaccounted time", "the longest time before the first token that lies in no stage"),
    "first_turn_ttft_s": Metric("s", "First turn of a chat", "seconds to its first token; less is better"),
    "next_turn_ttft_s": Metric("s", "Further turns", "seconds to the first token; less is better"),
    "tokens_per_s_b1": Metric("tokens/s", "Throughput at batch 1", "tokens per second; more is better"),
    "tokens_per_s_b8": Metric("tokens/s", "Throughput at batch 8", "tokens per second; more is better"),
    "first_mb": Metric("MB", "Memory of one instance", "proportional set size"),
    "added_mb": Metric("MB", "Memory of a further instance", "what the proportional set sizes grow by"),
    "added_system_mb": Metric("MB", "The same, seen by the machine", "growth of its anonymous and shared memory"),
    "fall_mb": Metric("MB", "Memory that the machine has less", "by how much its available memory has fallen"),
    "sent_mb": Metric("MB", "Bytes sent by the store"),
    "size_mb": Metric("MB", "Size of the weights"),
}


def add(result: Result, name: str, metric: str, samples: Sequence[float]) -> None:
    """Add a row of ``name`` if there are samples. Raises KeyError for a metric that is not listed above."""
    result.add(name, metric, METRICS[metric].unit, samples)
