"""Live scaling: plans by which a new instance helps a loaded one while its own layers arrive (BlitzScale §5.2)."""

from __future__ import annotations

import secrets
import time
from typing import Any

from .models import Models
from .nodes import KnownInstance, LiveRendezvous, Nodes, group_address
from .state import State


class Live:
    """The live pairs of instances. An instance helps at most one other, and has at most one helper at a time.

    The secrets are only in memory. After a restart of the controller, older instances serve, but get no helpers.
    """

    def __init__(self, state: State, nodes: Nodes, models: Models) -> None:
        self._state = state
        self._nodes = nodes
        self._models = models

    async def plan(self, new: KnownInstance, partner: str | None) -> dict[str, Any] | None:
        """Return the ``GroupPlan`` of a new instance, as JSON, or None if it starts without live scaling.

        ``partner`` is the instance that the policy wants it to help. Raises ClusterError if the new instance's node
        does not answer.
        """
        state = self._state
        if not self._models.scales_live(state.deployments[new.model], time.monotonic()):
            return None
        source = self._source(new, partner)
        if source is not None and source.live is not None:
            new.helps, new.loading = source.id, True
            state.record_event(
                "live", f"{new.id} helps {source.id} while its layers arrive", node=new.node, model=new.model
            )
            return source.live.plan(1)
        place = await group_address(self._nodes, state.nodes[new.node])
        new.live = LiveRendezvous(f"{new.id}-live", secrets.token_hex(16), place)
        return new.live.plan(0)

    def _source(self, new: KnownInstance, partner: str | None) -> KnownInstance | None:
        """Return the instance to help: the policy's, or if that one cannot be helped, the most loaded one.

        It computes on the same kind of processor as the new one.
        """
        if partner is None:
            return None
        state, device = self._state, self._state.deployments[new.model].device
        instances, nodes = state.instances.values(), state.nodes
        helped = {item.helps for item in instances if item.loading}
        able = [
            item
            for item in instances
            if item.model == new.model and item.live and item.state == "ready" and item.id not in helped
            if item.node in nodes and nodes[item.node].processor(device) == nodes[new.node].processor(device)
        ]
        return max(able, key=lambda item: (item.id == partner, item.running), default=None)
