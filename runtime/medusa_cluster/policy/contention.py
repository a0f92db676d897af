"""Contention on a node's link: the bandwidth for a new fetch, and whether the others still meet their deadlines.

ParaServe §4.2, Algorithm 2 and Eq. 3. Beside N fetches, a new one gets B/(N+1) of the bandwidth B. The paper's listing
prints B/N, which contradicts Eq. 3. Eq. 4, the bytes pending after a while, is not computed, because nodes report them.
``Placement`` says which fetches of a node count, and until when they have to end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fetching:
    """A fetch of a node: the bytes that are missing, and when all of them have to be there."""

    name: str
    pending_bytes: float
    deadline_s: float


def newcomer_bytes_per_s(link_bytes_per_s: float, fetching: Sequence[Fetching], now_s: float) -> float:
    """Return the bandwidth for one more fetch, or 0 if another one would then miss its deadline (Eq. 3)."""
    share = link_bytes_per_s / (len(fetching) + 1)
    if any(fetch.pending_bytes > share * (fetch.deadline_s - now_s) for fetch in fetching):
        return 0.0
    return share
