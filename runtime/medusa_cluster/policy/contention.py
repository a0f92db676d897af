"""Fetches that share a node's link: what a newcomer would get, and whether the others still meet their deadlines.

ParaServe §4.2, Algorithm 2 and Eq. 3 and 4. With N fetches a newcomer gets B/(N+1) of the bandwidth B; the paper's
listing prints B/N, which Eq. 3 does not mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Fetching:
    """A fetch of a node: what is missing, and when all of it has to be there."""

    name: str
    pending_bytes: float
    deadline_s: float


def newcomer_bytes_per_s(link_bytes_per_s: float, fetching: Sequence[Fetching], now_s: float) -> float:
    """Return the bandwidth for one fetch more, or 0 where one of the others would then miss its deadline (Eq. 3)."""
    share = link_bytes_per_s / (len(fetching) + 1)
    if any(fetch.pending_bytes > share * (fetch.deadline_s - now_s) for fetch in fetching):
        return 0.0
    return share


def settle(link_bytes_per_s: float, fetching: Sequence[Fetching], since_s: float, now_s: float) -> tuple[Fetching, ...]:
    """Return the fetches that are still going on after equal shares since the last change (Eq. 4)."""
    if not fetching:
        return ()
    moved = link_bytes_per_s / len(fetching) * (now_s - since_s)
    return tuple(
        replace(fetch, pending_bytes=fetch.pending_bytes - moved) for fetch in fetching if fetch.pending_bytes > moved
    )
