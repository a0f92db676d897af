"""What the timelines of a node's instances say: how long a start took, and what has become of a group."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout

from .instances import Instances, RunningInstance

logger = logging.getLogger(__name__)

_SOON_S, _LATER_S = 0.25, 2.0  # between two looks: at a start, and at an instance that nobody has asked yet
_START_S = 60.0
_ENDS = ("alone", "consolidated", "released")  # marks after which an instance shares its model no more
_UNREADABLE = (ClientError, TimeoutError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError)


class Starts:
    """Looks at each instance until its first token has come, and at one that shares its model until that ends."""

    def __init__(self, instances: Instances) -> None:
        self._instances = instances
        self._looked: dict[str, float] = {}

    async def run(self) -> None:
        """Work until cancelled."""
        async with ClientSession(timeout=ClientTimeout(total=2.0)) as session:
            while True:
                for instance in self._instances.all():
                    if self._is_due(instance):
                        await self._look(session, instance)
                known = {instance.id for instance in self._instances.all()}
                self._looked = {name: at for name, at in self._looked.items() if name in known}
                await asyncio.sleep(_SOON_S)

    def _is_due(self, instance: RunningInstance) -> bool:
        known = instance.start is not None and "decode_s" in instance.start
        shares = instance.worker is not None and instance.worker.is_followed and instance.group_state == "serving"
        if instance.port is None or instance.failure is not None or not (shares or not known):
            return False
        now = asyncio.get_running_loop().time()
        first = self._looked.setdefault(f"{instance.id}", now)
        if not shares and now - first > _START_S:
            if instance.start is not None:
                return False  # it had its first token, and decodes too little to be measured
            return (now - first) % _LATER_S < _SOON_S
        return True

    async def _look(self, session: ClientSession, instance: RunningInstance) -> None:
        url = f"http://127.0.0.1:{instance.port}/timeline"
        try:
            async with session.get(url, headers={"Authorization": f"Bearer {instance.secret}"}) as answer:
                stages = (await answer.json())["stages"]
            start = summary(stages, instance.asked_ns)
            ends = [stage["name"] for stage in stages if stage["name"] in _ENDS]
        except _UNREADABLE as error:  # its port may be another's now
            logger.debug("the timeline of %s could not be read: %s", instance.id, error)
            return
        instance.start = start or instance.start
        instance.group_state = ends[-1] if ends else instance.group_state


def summary(stages: Sequence[Mapping[str, Any]], asked_ns: int | None) -> dict[str, float] | None:
    """Return what a start took, in seconds, by its instance's own stages; None before its first token.

    ``asked_ns``: when the first request came. ``ttft_s`` is 0 where that was after it could have been computed, so that
    the first token came late for want of a request. ``begins_s``: until the engine could compute, or for a group's
    leader until the group had come together. ``prefill_s``: of the first forward, without waiting for weights, and of
    what an engine does between its weights and that forward; a request that came later leaves that out.
    ``decode_s``: of a step that only decodes, through all workers; it is there after some of them.
    """
    own = [stage for stage in stages if not str(stage["process"]).startswith("worker ")]

    def first(name: str, edge: str) -> float | None:
        return next((stage[edge] / 1e9 for stage in own if stage["name"] == name), None)

    began, token = first("exec", "start_ns"), first("first_token", "start_ns")
    forward, computed = first("first_forward", "start_ns"), first("first_forward", "end_ns")
    if began is None or token is None or forward is None or computed is None:
        return None
    # It could compute when the first load had ended: that of a group's leader is of its own part, and others follow.
    loaded = first("load", "end_ns") or forward
    could = max(loaded, first("skeleton", "end_ns") or 0.0, first("form", "end_ns") or 0.0)
    waits = sum(stage["duration_ms"] for stage in own if stage["name"] == "wait") / 1e3
    waited_for = asked_ns is not None and asked_ns / 1e9 <= could
    decodes = next((stage["detail"]["step_ms"] / 1e3 for stage in own if stage["name"] == "decodes"), None)
    return {
        "ttft_s": token - began if waited_for else 0.0,
        "begins_s": (first("skeleton", "end_ns") or forward) - began,
        "prefill_s": max(computed - forward - waits, 0.0) + (max(forward - could, 0.0) if waited_for else 0.0),
        **({} if decodes is None else {"decode_s": decodes}),
    }


__all__ = ["Starts", "summary"]
