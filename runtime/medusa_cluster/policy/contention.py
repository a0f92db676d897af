"""Fetches that share a node's link: what a newcomer would get, and whether the others still meet their deadlines.

ParaServe §4.2, Algorithm 2 and Eq. 3. With N fetches a newcomer gets B/(N+1) of the bandwidth B; the paper's
listing prints B/N, which Eq. 3 does not mean. Eq. 4, what is pending after a while, is what nodes report.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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
