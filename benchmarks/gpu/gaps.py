"""The times between the tokens of an answer, and what its workers did in the longest of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from medusa_runtime.timeline import Stage

_LONGEST = 3  # how many gaps are described
_MOST_STAGES = 12  # of one gap


def median_ms(times: Sequence[float], *, since: float = 0.0, until: float = float("inf")) -> float | None:
    """Return the median gap between two tokens, of those that both came in this time; None if there is none.

    ``times`` are those of the tokens, in seconds.
    """
    gaps = sorted(b - a for a, b in itertools.pairwise(times) if since <= a and b <= until)
    return gaps[len(gaps) // 2] * 1e3 if gaps else None


def longest(times: Sequence[float], stages: Iterable[Stage]) -> list[dict[str, Any]]:
    """Describe the longest gaps, the longest first: the number of the token after it, its length, and its stages.

    ``times`` are seconds of the stages' clock. A stage has the milliseconds from the gap's begin to its own begin and
    end; it may begin before the gap, and end after it. Those that overlap the gap most come first.
    """
    ordered = sorted(range(1, len(times)), key=lambda token: times[token - 1] - times[token])[:_LONGEST]
    stages = list(stages)
    return [
        {
            "token": token,
            "ms": (times[token] - times[token - 1]) * 1e3,
            "stages": _within(stages, int(times[token - 1] * 1e9), int(times[token] * 1e9)),
        }
        for token in ordered
    ]


def _within(stages: list[Stage], begin_ns: int, end_ns: int) -> list[list[Any]]:
    def overlap_ns(stage: Stage) -> int:
        return min(stage.end_ns, end_ns) - max(stage.start_ns, begin_ns)

    found = [stage for stage in stages if stage.start_ns <= end_ns and stage.end_ns >= begin_ns]
    found = sorted(found, key=overlap_ns, reverse=True)[:_MOST_STAGES]
    return [
        [f"{one.process} {one.name}", (one.start_ns - begin_ns) / 1e6, (one.end_ns - begin_ns) / 1e6] for one in found
    ]
