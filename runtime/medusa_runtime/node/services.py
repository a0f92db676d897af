"""The services of the agent: models, engine processes, and the rules about both."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from .. import __version__
from ..storage.base import scheme_of
from .callers.accounts import Accounts
from .callers.peer import Caller
from .callers.policy import Policy
from .engines.pool import EnginePool
from .messages import LARGEST_BYTES
from .regions.keeper import RegionKeeper
from .regions.region_entry import RegionEntry
from .settings import NodeSettings

_MOST_LISTED = 100  # models in the status
_LISTED_BYTES = LARGEST_BYTES // 2  # for these models; the rest of the message is for everything else


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of the agent that a caller's requests reach."""

    settings: NodeSettings
    policy: Policy
    accounts: Accounts
    keeper: RegionKeeper
    engines: EnginePool
    started_at: float = field(default_factory=time.monotonic)

    def status(self, caller: Caller, entry: RegionEntry | None) -> dict[str, object]:
        """Return the agent's status for a caller: everything if it is trusted, or else what concerns that caller."""
        pool, trusted = self.keeper.regions, caller.trusted
        visible = [one for one in pool if trusted or one is entry]
        return {
            "pid": os.getpid(),
            "socket": self.settings.path if trusted else caller.socket,
            "runtime": __version__,
            "uptime_s": round(time.monotonic() - self.started_at, 1),
            "budget_bytes": pool.budget_bytes,
            "ready_bytes": self.keeper.ready_bytes if trusted else 0,
            "used_bytes": pool.used_bytes if trusted else sum(one.size_bytes for one in visible),
            "left_bytes": pool.left_bytes if trusted else 0,
            "engines": self.engines.status(everything=trusted),
            "replaced": dict(self.keeper.replaced),
            "fetches": dict(self.keeper.fetches),
            "count": len(list(pool)) if trusted else len(visible),
            "regions": _listed(visible),
            **self.accounts.status(everybody=trusted),
        }


def _listed(regions: Sequence[RegionEntry]) -> list[dict[str, object]]:
    """Return the status of as many regions as fit into a message: pinned ones, those of stores, and large ones first.

    A caller's many small models must not hide a model that other nodes of a cluster read from here.
    """
    needed = sorted(
        regions, key=lambda entry: (entry.pinned, bool(scheme_of(entry.key)), entry.size_bytes), reverse=True
    )
    found: list[dict[str, object]] = []
    left_bytes = _LISTED_BYTES
    for entry in needed[:_MOST_LISTED]:
        status = entry.status()
        left_bytes -= len(json.dumps(status))
        if left_bytes >= 0:
            found.append(status)
    return found
