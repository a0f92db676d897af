"""Live scaling: plans by which a new instance helps a loaded one while its own layers arrive (BlitzScale §5.2)."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .nodes import KnownInstance, Nodes, group_address

if TYPE_CHECKING:
    from .cluster import Cluster

_FORM_S = 5.0  # how long a new instance tries to reach the one that it helps; after that it only loads


@dataclass(frozen=True, slots=True)
class LiveRendezvous:
    """The address at which an instance waits for a helper, and the secret by which it recognizes the helper."""

    group: str
    token: str
    leader: str  # HOST:PORT

    def plan(self, rank: int) -> dict[str, Any]:
        """Return the ``GroupPlan`` of one of the two, as JSON. Rank 0 waits for a helper; rank 1 is the helper."""
        pair = {"group": self.group, "token": self.token, "leader": self.leader}
        return {**pair, "mode": "live", "rank": rank, "size": 2, "form_s": _FORM_S}


class Live:
    """The live pairs of instances. An instance helps at most one other, and has at most one helper at a time.

    The secrets are only in memory. After a restart of the controller, older instances serve, but get no helpers.
    """

    def __init__(self, cluster: Cluster, nodes: Nodes) -> None:
        self._cluster = cluster
        self._nodes = nodes

    async def plan(self, new: KnownInstance, partner: str | None) -> dict[str, Any] | None:
        """Return the ``GroupPlan`` of a new instance, as JSON, or None if it starts without live scaling.

        ``partner`` is the instance that the policy wants it to help. Raises ClusterError if the new instance's node
        does not answer.
        """
        cluster = self._cluster
        if not cluster.models.scales_live(cluster.deployments[new.model], time.monotonic()):
            return None
        source = self._source(new, partner)
        if source is not None and source.live is not None:
            new.helps, new.loading = source.id, True
            cluster.record_event(
                "live", f"{new.id} helps {source.id} while its layers arrive", node=new.node, model=new.model
            )
            return source.live.plan(1)
        place = await group_address(self._nodes, cluster.nodes[new.node])
        new.live = LiveRendezvous(f"{new.id}-live", secrets.token_hex(16), place)
        return new.live.plan(0)

    def _source(self, new: KnownInstance, partner: str | None) -> KnownInstance | None:
        """Return the instance to help: the policy's, or if that one cannot be helped, the most loaded one."""
        if partner is None:
            return None
        instances = self._cluster.instances.values()
        helped = {item.helps for item in instances if item.loading}
        able = [
            item
            for item in instances
            if item.model == new.model and item.live and item.state == "ready" and item.id not in helped
        ]
        return max(able, key=lambda item: (item.id == partner, item.running), default=None)


__all__ = ["Live", "LiveRendezvous"]
