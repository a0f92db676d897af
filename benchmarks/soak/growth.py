"""A check for growth with the work done: a robust line through samples, and how far they have risen by the end."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

from medusa_runtime.errors import MedusaError

# By the first word of a quantity's name: by how much it may grow over a whole run, in its unit. Allocators fill slowly;
# the timeline and the events of a cluster's status have an end of their own.
_ALLOWED = {
    "memory": 8.0, "shared": 2.0, "descriptors": 4.0, "threads": 2.0, "files": 2.0, "timeline": 1024.0, "status": 32.0,
    "log": 10.0,
}  # fmt: skip
_ALLOWED_OF_OTHERS = 1.0
_LEAST_SAMPLES = 5
_WARM_UP = 0.3  # the share of the samples that does not count


class Growth(NamedTuple):
    """How a quantity has changed after the warm-up: its ``slope`` by 1000 units of work, and its ``rise`` over all."""

    name: str
    first: float
    last: float
    slope: float
    rise: float
    allowed: float

    @property
    def grows(self) -> bool:
        """Whether it rises by more than is allowed, by the fitted line and also by the samples at its ends."""
        return self.rise > self.allowed and self.last - self.first > self.allowed


def enough(samples: Sequence[tuple[float, dict[str, float]]]) -> bool:
    """Return whether `growths` takes these samples."""
    return len(_after_warm_up(samples)) >= _LEAST_SAMPLES


def growths(samples: Sequence[tuple[float, dict[str, float]]]) -> list[Growth]:
    """Return the growth of each quantity in samples of (work done, quantities), without the first part of the samples.

    The line is Theil and Sen's: the median of the slopes between all pairs. Both ends are medians of a fifth of the
    samples. Raises MedusaError for less than five samples after the warm-up.
    """
    kept = _after_warm_up(samples)
    if not enough(samples):
        raise MedusaError(f"expected {_LEAST_SAMPLES} samples after the warm-up, found {len(kept)}; run it for longer")
    work = [done for done, _ in kept]
    found = []
    for name in sorted({name for _, quantities in kept for name in quantities}):
        values = [quantities.get(name, 0.0) for _, quantities in kept]
        slopes = [(b - a) / (y - x) for (x, a), (y, b) in combinations(zip(work, values, strict=True), 2) if y > x]
        slope = statistics.median(slopes) if slopes else 0.0
        end = max(1, len(values) // 5)
        first, last = statistics.median(values[:end]), statistics.median(values[-end:])
        allowed = _ALLOWED.get(name.split()[0], _ALLOWED_OF_OTHERS)
        found.append(Growth(name, first, last, slope * 1000, slope * (work[-1] - work[0]), allowed))
    return found


def _after_warm_up(samples: Sequence[tuple[float, dict[str, float]]]) -> Sequence[tuple[float, dict[str, float]]]:
    return samples[round(len(samples) * _WARM_UP) :]


def table(found: Sequence[Growth]) -> str:
    """Return the growths as a table, those that grow marked."""
    rows = [("quantity", "first", "last", "per 1000", "over the run", "")]
    for each in found:
        numbers = (f"{each.first:.1f}", f"{each.last:.1f}", f"{each.slope:+.3f}", f"{each.rise:+.1f}")
        rows.append((each.name, *numbers, "GROWS" if each.grows else ""))
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    lines = ("  ".join(cell.rjust(width) if place else cell.ljust(width) for place, (cell, width) in
             enumerate(zip(row, widths, strict=True))).rstrip() for row in rows)  # fmt: skip
    return "\n".join(lines)
