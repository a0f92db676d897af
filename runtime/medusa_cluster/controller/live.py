"""Instances that help others: while their own layers arrive (BlitzScale §5.2), or by prefilling for them (§5.4)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from ..deployment import Deployment
from .models import Models
from .nodes import MOST_PREFILLING, KnownInstance, Nodes, Rendezvous, group_address
from .state import State

_MEETS_S = 10.0  # for a new instance to have a place where others can come to help it
_POLL_S = 0.05


class Live:
    """Who helps whom.

    With live scaling, an instance helps at most one other, and has at most one helper at a time. With prefill and
    decode apart, an instance that decodes has up to ``MOST_PREFILLING`` others. Nodes show where each instance can be
    met, and secrets follow from the cluster's, so a new controller goes on.
    """

    def __init__(self, state: State, nodes: Nodes, models: Models) -> None:
        self._state = state
        self._nodes = nodes
        self._models = models

    async def plan(self, new: KnownInstance, partner: str | None) -> dict[str, Any] | None:
        """Return the ``group`` of a new instance's start, as JSON, or None if it neither helps nor is helped.

        ``partner`` is the instance that the policy wants it to help. Raises ClusterError if the new instance's node
        does not answer.
        """
        deployment = self._state.deployments[new.model]
        if deployment.disaggregated:
            return await self._separate(new, deployment)
        if not self._models.scales_live(deployment, time.monotonic()):
            return None
        source = self._source(new, partner)
        if source is not None and source.meets is not None:
            return self._help(new, source, source.meets, "while its layers arrive")
        return self._wait(new, Rendezvous(f"{new.id}-live", await self._place(new), "live"))

    async def _separate(self, new: KnownInstance, deployment: Deployment) -> dict[str, Any]:
        """Plan an instance that prefills or decodes. One that finds nobody to prefill for decodes, too."""
        place = await self._place(new)
        if new.role == "prefill" and self._models.may_share(deployment, time.monotonic()):
            deadline = time.monotonic() + _MEETS_S
            while (found := self._decoding(new)) and found[0].meets is None and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_S)
            source = next((item for item in found if item.meets is not None), None)
            if source is not None and source.meets is not None:
                return self._help(new, source, source.meets, "by prefilling for it") | {"listen": place}
        new.role = "decode"
        return self._wait(new, Rendezvous(f"{new.id}-decode", place, "disaggregated"))

    def _help(self, new: KnownInstance, source: KnownInstance, meets: Rendezvous, how: str) -> dict[str, Any]:
        new.helps, new.helping, new.loading = source.id, True, True
        self._state.record_event("live", f"{new.id} helps {source.id} {how}", node=new.node, model=new.model)
        return meets.plan(1, self._nodes.group_token(meets.group)) | {"helps": source.id}

    def _wait(self, new: KnownInstance, meets: Rendezvous) -> dict[str, Any]:
        new.meets = meets
        return meets.plan(0, self._nodes.group_token(meets.group))

    async def _place(self, new: KnownInstance) -> str:
        return await group_address(self._nodes, self._state.nodes[new.node])

    def _source(self, new: KnownInstance, partner: str | None) -> KnownInstance | None:
        """Return the instance to help: the policy's, or if that one cannot be helped, the most loaded one."""
        if partner is None:
            return None
        helped = {item.helps for item in self._state.instances.values() if item.helping}
        able = [
            item for item in self._alike(new) if item.meets and item.state == "ready" and item.id not in helped
        ]  # fmt: skip
        return max(able, key=lambda item: (item.id == partner, item.running), default=None)

    def _decoding(self, new: KnownInstance) -> list[KnownInstance]:
        """Return the instances that a new one can prefill for, those first that can be met, and have the fewest others.

        Among them are those that start, and will have a place to be met in a moment.
        """
        helpers = [item.helps for item in self._state.instances.values() if item.helping]
        able = [
            item
            for item in self._alike(new)
            if item.role == "decode" and not item.helping and item.state in ("starting", "ready")
            if helpers.count(item.id) < MOST_PREFILLING
        ]
        return sorted(able, key=lambda item: (item.meets is None, helpers.count(item.id), item.id))

    def _alike(self, new: KnownInstance) -> list[KnownInstance]:
        """Return the model's other instances that compute on the same kind of processor as the new one."""
        state, device = self._state, self._state.deployments[new.model].device
        nodes = state.nodes
        return [
            item
            for item in state.instances.values()
            if item.model == new.model and item.id != new.id and item.node in nodes
            if nodes[item.node].processor(device) == nodes[new.node].processor(device)
        ]
