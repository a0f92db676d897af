"""Instances that help others: while their own layers arrive (BlitzScale §5.2), or by prefilling for them (§5.4)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from medusa_runtime.storage.retry import doubling_pause_s

from ..deployment import Deployment
from ..policy.state import MOST_PREFILLING
from .models import Models
from .nodes import KnownInstance, Nodes, Rendezvous, group_address
from .state import State

_MEETS_S = 10.0  # for a new instance to have a place where others can come to help it
_POLL_S = 0.05
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 300.0  # after an instance that was to prefill, and does not


class Live:
    """Finds the instance that a new one helps.

    With live scaling, an instance helps at most one other, and has at most one helper at a time. With prefill and
    decode apart, an instance that decodes has up to ``MOST_PREFILLING`` others. Nodes show where each instance can be
    met, and secrets follow from the cluster's, so a new controller goes on.
    """

    def __init__(self, state: State, nodes: Nodes, models: Models) -> None:
        self._state = state
        self._nodes = nodes
        self._models = models
        self._withheld: dict[
            str, tuple[int, float]
        ] = {}  # model → starts that did not prefill, and until when none may
        self._whole: set[tuple[str, str]] = set()  # models of which an event says that instances share no work, and why

    def may_prefill(self, deployment: Deployment) -> bool:
        """Return whether instances may start in order to prefill.

        Not before a node has described the model, which may be an encoder, and not for a while after one that came to
        decode.
        """
        known = self._models.get(deployment.url) is not None
        return known and time.monotonic() >= self._withheld.get(deployment.name, (0, 0.0))[1]

    def note_not_prefilling(self, model: str) -> None:
        """Note that an instance was started in order to prefill, and does not. The pause doubles each time."""
        count, now = self._withheld.get(model, (0, 0.0))[0] + 1, time.monotonic()
        self._withheld[model] = count, now + doubling_pause_s(count, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S)

    def update(self) -> list[KnownInstance]:
        """Look what has become of the instances that prefill. Return those whose source is gone or ends."""
        self._note_whole()
        instances = self._state.instances
        left: list[KnownInstance] = []
        self._withheld = {model: found for model, found in self._withheld.items() if model in self._state.deployments}
        for item in instances.values():
            if item.role == "prefill":
                source = instances.get(item.helps or "")
                if item.helping and not item.loading:
                    item.has_prefilled = True
                    self._withheld.pop(item.model, None)
                    if source is not None:
                        source.deserted = False
                if item.helping and item.confirmed and (source is None or source.state == "draining"):
                    left.append(item)
            elif item.wanted_role == "prefill":
                item.wanted_role = item.role
                if not item.has_prefilled:
                    self.note_not_prefilling(item.model)
                elif item.state != "draining":
                    self._note_deserted(item)
        return left

    def _note_deserted(self, item: KnownInstance) -> None:
        """Note that an instance prefills no more though nobody told it so: it has lost the one it prefilled for."""
        source = self._state.instances.get(item.helps or "")
        if source is not None:
            source.deserted = True
        text = f"{item.id} takes requests of its own: it has lost {item.helps}, for which it prefilled"
        self._state.record_event("role", text, node=item.node, model=item.model)

    def _note_whole(self) -> None:
        """Record once, of each model whose instances are to share work, why they do not: an encoder, or not known."""
        found: dict[tuple[str, str], str] = {}
        for item in self._state.deployments.values():
            name = item.name
            if (item.disaggregated or item.live_scaling) and not self._models.generates(item):
                flag = "--disaggregated" if item.disaggregated else "--live-scaling"
                text = f"is ignored for {name}: it is an encoder, which writes no text, and each instance does all"
                found[name, "encoder"] = f"{flag} {text}"
            if item.disaggregated and (why := self._models.why_unknown(item.url)) is not None:
                text = f"waits for {name}: each instance does all until a node can describe the model"
                found[name, "unknown"] = f"--disaggregated {text}; {why}"
        for key in found.keys() - self._whole:
            self._state.record_event("whole", found[key], model=key[0])
        self._whole = set(found)

    async def plan(self, new: KnownInstance, partner: str | None) -> dict[str, Any] | None:
        """Return the ``group`` of a new instance's start, as JSON, or None if it neither helps nor is helped.

        ``partner`` is the instance that the policy wants it to help. Raises ClusterError if the new instance's node
        does not answer.
        """
        deployment = self._state.deployments[new.model]
        if self._models.is_apart(deployment):
            return await self._separate(new, partner)
        if not self._models.scales_live(deployment, time.monotonic()):
            return None
        source = self._source(new, partner)
        if source is not None and source.meets is not None:
            return self._help(new, source, source.meets, "while its layers arrive")
        return self._wait(new, Rendezvous(f"{new.id}-live", await self._place(new), "live"))

    async def _separate(self, new: KnownInstance, partner: str | None) -> dict[str, Any]:
        """Plan an instance that prefills or decodes. One that finds nobody to prefill for decodes, too.

        With live scaling, one that the policy wants to relieve another one that prefills does so for all those that
        prefill for the same instance, with which their prompts wait.
        """
        place = await self._place(new)
        if new.role == "prefill":
            relieved = self._state.instances.get(partner or "")
            live = self._state.deployments[new.model].live_scaling
            first = relieved.helps if relieved is not None and live else None
            deadline = time.monotonic() + _MEETS_S
            while (found := self._decoding(new, first)) and found[0].meets is None and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_S)
                if not self._state.is_wanted(new):
                    break
            source = next((item for item in found if item.meets is not None), None)
            if source is not None and source.meets is not None:
                relieves = source.id == first
                how = "by prefilling for it" + (", at first with the layers that it has" if relieves else "")
                return self._help(new, source, source.meets, how) | {"listen": place, "relieves": relieves}
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

    def _decoding(self, new: KnownInstance, first: str | None) -> list[KnownInstance]:
        """Return the instances that a new one can prefill for, those first that can be met, and have the fewest others.

        ``first`` comes before all others. Among them are those that start, or have just been told to decode, and will
        have a place to be met in a moment.
        """
        helpers = [item.helps for item in self._state.instances.values() if item.helping]
        able = [
            item
            for item in self._alike(new)
            if item.role == "decode" and item.state in ("starting", "ready")
            if helpers.count(item.id) < MOST_PREFILLING
        ]
        # Of those with the fewest, not the one that is the next to end: the youngest one without requests.
        return sorted(
            able,
            key=lambda item: (
                *(item.id != first, item.meets is None, helpers.count(item.id)),
                *(item.deserted, -item.running, item.since_s),
            ),
        )

    def _alike(self, new: KnownInstance) -> list[KnownInstance]:
        """Return the model's other instances that compute on the same kind of processor as the new one."""
        state, device = self._state, self._state.deployments[new.model].device
        nodes = state.nodes
        return [
            item
            for item in state.instances.values()
            if item.model == new.model and item.id != new.id and item.node in nodes
            if item.digest == new.digest
            if nodes[item.node].processor(device) == nodes[new.node].processor(device)
        ]
