"""All regions of a node, within a memory budget. The least recently used are evicted first; those in use never are.

This is the node's share of BlitzScale's parameter pool (§5): one copy of a model in a host's memory for all instances.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ...errors import MedusaError, NodeRefusedError, TooLargeError
from ...storage.base import redacted
from ..callers.accounts import Accounts
from ..callers.peer import Caller
from ..callers.policy import Policy, is_below_prefix
from .region_entry import RegionEntry

_MOST_UNUSED = 256  # unused regions; even small ones cost descriptors


class _Limit(NamedTuple):
    """A limit of memory, and the other regions that share it."""

    limit_bytes: int
    others: list[RegionEntry]
    other_bytes: int  # memory that is charged to the same caller, but is not for regions
    refusal: type[MedusaError]
    whose: str  # for a message: whose limit it is, and how much
    flag: str  # the flag that raises the limit


class RegionPool:
    """The regions, by slot. ``on_drop`` is called with each that is dropped, to end its prefetcher and close it."""

    def __init__(
        self, budget_bytes: int, policy: Policy, accounts: Accounts, on_drop: Callable[[RegionEntry], None]
    ) -> None:
        self.budget_bytes = budget_bytes
        self._policy = policy
        self._accounts = accounts
        self._on_drop = on_drop
        self._regions: dict[str, RegionEntry] = {}
        self._left: list[RegionEntry] = []  # dropped, but functions still have them: such as a replaced model's

    def __iter__(self) -> Iterator[RegionEntry]:
        return iter(tuple(self._regions.values()))

    @property
    def used_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self) + self.left_bytes

    @property
    def left_bytes(self) -> int:
        """The memory of regions that were dropped while functions had them, until the last of these has ended."""
        return sum(entry.size_bytes for entry in self._left)

    def get(self, slot: str) -> RegionEntry | None:
        return self._regions.get(slot)

    def of_key(self, key: str) -> list[RegionEntry]:
        """Return all regions of one checkpoint. A local one may have a region for each user."""
        return [entry for entry in self if entry.key == key]

    def add(self, entry: RegionEntry) -> None:
        assert entry.slot not in self._regions
        unused = [other for other in self if not other.in_use and other.fetch is None]
        for other in sorted(unused, key=lambda other: other.used_at)[: max(len(unused) + 1 - _MOST_UNUSED, 0)]:
            self.drop(other)
        self._regions[entry.slot] = entry

    def admit(self, entry: RegionEntry, size_bytes: int) -> None:
        """Make room for a region of this size. Raises TooLargeError or NodeRefusedError if a limit forbids it."""
        limits = self._limits(entry)
        for limit in limits:  # check all of them before anything is dropped
            _check(limit, entry, size_bytes)
        for limit in limits:
            self._make_room(limit, size_bytes)
        entry.size_bytes = size_bytes

    def check_share(self, entry: RegionEntry, caller: Caller) -> None:
        """Raise NodeRefusedError if this caller would pay for a region that is there, and may not have that much more.

        It pays for one that nobody uses, such as one that it has asked for on an earlier connection.
        """
        if entry.payer is None and not entry.pinned and not caller.trusted:
            _check(self._share(entry, caller), entry, entry.size_bytes)

    def charged_bytes(self, account: str) -> int:
        """Return the memory of the regions that are charged to one account."""
        return sum(
            entry.size_bytes
            for entry in (*self, *self._left)
            if (payer := entry.payer) is not None and payer.account == account
        )

    def _limits(self, entry: RegionEntry) -> list[_Limit]:
        others = [other for other in (*self, *self._left) if other is not entry]
        budget = f"the node agent's budget of {_mb(self.budget_bytes)}"
        limits = [_Limit(self.budget_bytes, others, 0, TooLargeError, budget, "--memory-budget")]
        for prefix, size_bytes in self._policy.quotas(entry.key):
            shared = [other for other in others if is_below_prefix(other.key, prefix)]
            quota = f"the quota of {_mb(size_bytes)} for {redacted(prefix)}"
            limits.append(_Limit(size_bytes, shared, 0, NodeRefusedError, quota, "--quota"))
        payer = entry.payer
        if payer is not None and not payer.trusted:
            limits.append(self._share(entry, payer))
        return limits

    def _share(self, entry: RegionEntry, payer: Caller) -> _Limit:
        """Return the limit of one caller, which pays for a region."""
        account, most = payer.account, self._accounts.memory_bytes
        regions = (other for other in (*self, *self._left) if other is not entry)
        shared = [other for other in regions if other.payer is not None and other.payer.account == account]
        other_bytes = self._accounts.charged(account, "memory_bytes")
        whose = f"what {account} may have, {_mb(most)}"
        return _Limit(most, shared, other_bytes, NodeRefusedError, whose, "--per-caller memory=…")

    def _make_room(self, limit: _Limit, size_bytes: int) -> None:
        used = limit.other_bytes + sum(other.size_bytes for other in limit.others)
        for other in sorted((other for other in limit.others if not other.in_use), key=lambda other: other.used_at):
            if used + size_bytes <= limit.limit_bytes:
                return
            used -= other.size_bytes
            self.drop(other)

    def release(self, entry: RegionEntry, lease: int) -> None:
        """End the lease of one connection on a region."""
        entry.leases.pop(lease, None)
        entry.waiting.pop(lease, None)
        entry.used_at = time.monotonic()
        if not entry.leases and entry in self._left:
            self._left.remove(entry)

    def drop(self, entry: RegionEntry) -> None:
        """Let go of a region. Functions that have it keep it, and its memory is freed after the last of them."""
        if self._regions.get(entry.slot) is entry:
            del self._regions[entry.slot]
            entry.pinned = False
            self._on_drop(entry)
            if entry.leases:
                self._left.append(entry)

    def close(self) -> None:
        for entry in self:
            self.drop(entry)


def _check(limit: _Limit, entry: RegionEntry, size_bytes: int) -> None:
    """Raise the limit's error if a region of this size does not fit, even if all that is unused made room."""
    fixed = limit.other_bytes + sum(other.size_bytes for other in limit.others if other.in_use)
    if size_bytes + fixed > limit.limit_bytes:
        used = f", of which {_mb(fixed)} are in use" if fixed >= 500_000 else ""
        raise limit.refusal(
            f"{redacted(entry.key)} takes {_mb(size_bytes)} of memory; expected at most {limit.whose}{used}; "
            f"raise {limit.flag}"
        )


def _mb(size_bytes: int) -> str:
    return f"{size_bytes / 1e6:,.0f} MB"
