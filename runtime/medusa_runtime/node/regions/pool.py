"""All regions of a node, within a memory budget: the least recently used go first, one in use never.

The node's share of BlitzScale's parameter pool (§5): one copy of a model in a host's memory, for all its instances.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ...errors import NodeRefusedError, TooLargeError
from ...storage.base import redacted
from ..policy import Policy, below
from .held_region import HeldRegion


class RegionPool:
    """``on_drop`` is told of every region that leaves; it ends its prefetcher and closes it."""

    def __init__(self, budget_bytes: int, policy: Policy, on_drop: Callable[[HeldRegion], None]) -> None:
        self.budget_bytes = budget_bytes
        self._policy = policy
        self._on_drop = on_drop
        self._regions: dict[str, HeldRegion] = {}

    def __iter__(self) -> Iterator[HeldRegion]:
        return iter(tuple(self._regions.values()))

    @property
    def used_bytes(self) -> int:
        return sum(held.size_bytes for held in self)

    def get(self, key: str) -> HeldRegion | None:
        return self._regions.get(key)

    def add(self, held: HeldRegion) -> None:
        assert held.key not in self._regions
        self._regions[held.key] = held

    def admit(self, held: HeldRegion, size_bytes: int) -> None:
        """Make room for a region. Raises TooLargeError or NodeRefusedError with who has the room instead."""
        limits = [("*", self.budget_bytes), *self._policy.quotas(held.key)]
        for prefix, limit_bytes in limits:  # all of them, before anything is dropped
            fixed = sum(other.size_bytes for other in self._others(held, prefix) if other.in_use)
            if size_bytes + fixed > limit_bytes:
                raise _no_room(held, prefix, size_bytes, fixed, limit_bytes)
        for prefix, limit_bytes in limits:
            self._make_room(self._others(held, prefix), size_bytes, limit_bytes)
        held.size_bytes = size_bytes

    def _others(self, held: HeldRegion, prefix: str) -> list[HeldRegion]:
        return [other for other in self if other is not held and below(other.key, prefix)]

    def _make_room(self, others: list[HeldRegion], size_bytes: int, limit_bytes: int) -> None:
        used = sum(other.size_bytes for other in others)
        for other in sorted((other for other in others if not other.in_use), key=lambda other: other.used_at):
            if used + size_bytes <= limit_bytes:
                return
            if other.size_bytes:
                used -= other.size_bytes
                self.drop(other)

    def release(self, held: HeldRegion, lease: int) -> None:
        """A connection that used it has ended."""
        held.leases.discard(lease)
        held.used_at = time.monotonic()

    def drop(self, held: HeldRegion) -> None:
        """Let go of it; those who have it keep it, and its memory goes with the last of them."""
        if self._regions.get(held.key) is held:
            del self._regions[held.key]
            self._on_drop(held)

    def close(self) -> None:
        for held in self:
            self.drop(held)


def _no_room(held: HeldRegion, prefix: str, size_bytes: int, fixed: int, limit_bytes: int) -> Exception:
    used = f", of which {_mb(fixed)} are in use" if fixed else ""
    message = f"{redacted(held.key)} takes {_mb(size_bytes)} of memory; expected at most "
    if prefix == "*":
        return TooLargeError(f"{message}the node agent's budget of {_mb(limit_bytes)}{used}; raise --memory-budget")
    return NodeRefusedError(f"{message}the quota of {_mb(limit_bytes)} for {redacted(prefix)}{used}; raise --quota")


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"
