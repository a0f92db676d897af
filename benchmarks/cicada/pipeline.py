"""What the stages of an inference come to: utilisation, and working and waiting time of each unit (Cicada §4.3)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

UNITS = {"construct": "L", "retrieve": "R", "index": "R", "fetch": "R", "plan": "A", "apply": "A", "execute": "E"}
UNITS["forward"] = "E"  # all layers and what is between them
NAMES = {"L": "construction", "R": "retrieval", "A": "application", "E": "execution"}

Span = tuple[float, float]


class Stage(NamedTuple):
    """A stage of one layer, or of all of them where ``layer`` is empty; seconds after the request."""

    name: str
    process: str
    start: float
    end: float
    layer: str


def active(stages: Sequence[Stage]) -> dict[str, list[Span]]:
    """When each unit worked, merged. A layer's execution is not at work while it waits at a gate."""
    waits = merged((s.start, s.end) for s in stages if s.name == "wait")
    spans: dict[str, list[Span]] = {unit: [] for unit in NAMES}
    for stage in stages:
        unit = UNITS.get(stage.name)
        if unit:
            whole = [(stage.start, stage.end)]
            spans[unit] += without(whole, waits) if unit == "E" else whole
    return {unit: merged(found) for unit, found in spans.items() if found}


def utilisation(stages: Sequence[Stage]) -> float:
    """The time in which at least one unit works, over the time from the first unit's start to the last one's end."""
    times = totals(stages)
    return times.active_s / times.pipeline_s


class Totals(NamedTuple):
    """The seconds in which at least one unit works, and those from the first start to the last end (Fig. 14)."""

    active_s: float
    pipeline_s: float


def totals(stages: Sequence[Stage]) -> Totals:
    union = merged(span for spans in active(stages).values() for span in spans)
    return Totals(total(union), union[-1][1] - union[0][0])


def working(stages: Sequence[Stage]) -> dict[str, float]:
    """Seconds in which each unit works."""
    return {unit: total(spans) for unit, spans in active(stages).items()}


def waiting(stages: Sequence[Stage]) -> dict[str, float]:
    """Seconds in which each unit, having begun and not ended, waits for another one."""
    return {unit: spans[-1][1] - spans[0][0] - total(spans) for unit, spans in active(stages).items()}


def merged(spans: Iterable[Span]) -> list[Span]:
    """The spans in order, with those that touch or overlap made one."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def without(spans: Iterable[Span], holes: Iterable[Span]) -> list[Span]:
    """Return what is left of ``spans`` outside ``holes``."""
    left = list(spans)
    for start, end in holes:
        left = [
            piece
            for first, last in left
            for piece in ((first, min(last, start)), (max(first, end), last))
            if piece[0] < piece[1]
        ]
    return left


def total(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
