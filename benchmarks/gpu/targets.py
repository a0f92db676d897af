"""The targets of the check of a GPU, and lines that say whether they were reached."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

SHORTER = 0.425  # MEDUSA's reduction of the loading phase
FASTER = 8.0  # restoring against warm-up plus capture
RESTORE_S = 1.0
OFFLINE_S, OFFLINE_BYTES = 60.0, 100 << 20  # the offline phase, and its bundle: "tens of MB"
LINK_SHARE = 0.85
REPLAYS = 6  # three inputs, two replays each
SLOWER = 0.01  # a restored graph's step against a captured one's


def judged(text: str, reached: bool) -> str:
    return f"{'ok  ' if reached else 'MISS'}  {text}"


def judged_steps(said: str, ratios: Sequence[float]) -> Iterator[str]:
    """Yield the line for restored steps, from their times over those of captured ones; none without such times."""
    if ratios:
        ratio = statistics.median(ratios)
        yield judged(f"{said}: restored steps take {ratio:.3f} of captured ones", ratio <= 1 + SLOWER)
