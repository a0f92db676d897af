"""The accounts of the agent's callers: how many connections, fetches and engines, and how much memory each has.

An account is a user, or a tenant's socket. A model's memory is charged to the first of its users. An unused model is
charged to no account, because it is evicted when the room is needed.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from ...errors import MedusaError, NodeRefusedError
from ..settings import CallerLimits
from .peer import Caller

_TOGETHER = {"connections": 4096, "fetches": 64, "prefetchers": 128}  # of all callers
_FLAGS = {"memory_bytes": "memory", "prefetchers": "fetches"}  # the name in --per-caller, where it is another
_MOST_NAMED = 64  # accounts in the status


class Accounts:
    """Counts and limits what callers have. The agent's own user has no limits, since it could also end the agent."""

    def __init__(self, limits: CallerLimits, budget_bytes: int) -> None:
        self._limits = limits
        self.memory_bytes = limits.memory_bytes or budget_bytes // 2
        self._charged: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._total: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._refused_callers: Counter[str] = Counter()

    def charge(self, caller: Caller, what: str, amount: int = 1) -> None:
        """Charge ``amount`` more to a caller's account. If that is too much, raise NodeRefusedError and charge nothing.

        ``what`` is "connections", "fetches", "engines", "memory_bytes", or "prefetchers": the processes of fetches,
        also those that were given up, as long as they have not ended.
        """
        had = self.charged(caller.account, what)
        if not caller.trusted:
            if had + amount > (limit := self._limit(what)):
                raise NodeRefusedError(
                    f"{caller.account} has {had:,} {what} of the node agent's already; expected at most {limit:,} "
                    f"(--per-caller {_FLAGS.get(what, what)}=…)"
                )
            together = _TOGETHER.get(what)
            if together is not None and self._total[what] + amount > together:
                raise NodeRefusedError(f"the node agent's callers have {together} {what} together; try again later")
            self._total[what] += amount
        self._charged[caller.account][what] += amount

    def refund(self, caller: Caller, what: str, amount: int = 1) -> None:
        """Take a charge back."""
        if not caller.trusted:
            self._total[what] -= amount
        had = self._charged[caller.account]
        had[what] -= amount
        if not any(had.values()):
            del self._charged[caller.account]

    def charged(self, account: str, what: str) -> int:
        """Return how much is charged to an account."""
        return self._charged[account][what] if account in self._charged else 0

    def count_refusal(self, caller: Caller, error: MedusaError) -> None:
        """Count a refusal to a caller."""
        self._refused[error.code] += 1
        if caller.account in self._refused_callers or len(self._refused_callers) < _MOST_NAMED:
            self._refused_callers[caller.account] += 1

    def status(self, *, everybody: bool) -> dict[str, object]:
        """Return the part of the status about callers. Accounts are named only with ``everybody``."""
        found: dict[str, object] = {"refused": dict(self._refused)}
        if everybody:
            found["refused_callers"] = dict(self._refused_callers)
            names = sorted(self._charged)[:_MOST_NAMED]
            found["callers"] = {name: {what: n for what, n in self._charged[name].items() if n} for name in names}
        return found

    def _limit(self, what: str) -> int:
        if what == "prefetchers":
            return 2 * self._limits.fetches
        return self.memory_bytes if what == "memory_bytes" else int(getattr(self._limits, what))
