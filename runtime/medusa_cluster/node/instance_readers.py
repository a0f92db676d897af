"""Readers of an instance's pages: whether it answers, how long its start took, its group's end, load and capacity.

The first is its probe, the next two are in its timeline, the others (BlitzScale §5.3) in its metrics, if it has
requests.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout

from ..connections import read_body
from .instances import Instances, RunningInstance

logger = logging.getLogger(__name__)

_PAUSE_S = 0.5  # between two readings of metrics, which take some 2 ms of CPU time
_ROOM, _USED, _RATE = (f"medusa_engine_{name}" for name in ("kv_tokens", "kv_tokens_used", "prefill_tokens_per_s"))
_PROBE_S, _SELDOM = 0.1, 20  # between two probes of an instance that starts; in how many rounds a late one has one
_SOON_S, _LATER_S = 0.25, 2.0  # of timelines: during a start, and of an instance that has no request yet
_START_S = 60.0
_ENDS = ("alone", "consolidated", "released")  # marks after which an instance no longer shares its model
_STATES = ("prefilling", *_ENDS)
_MOST_BYTES = 16 << 20  # of a page
# What a page raises while it is read and understood that is no page of ours: another process may have the port now.
UNREADABLE = (ClientError, TimeoutError, ValueError, LookupError, TypeError, ArithmeticError, RecursionError)


async def read_page(session: ClientSession, instance: RunningInstance, path: str) -> str:
    """Return the page at ``path``. Raises one of UNREADABLE, also if it has more than 16 MiB."""
    url = f"http://127.0.0.1:{instance.port}{path}"
    async with session.get(url, headers={"Authorization": f"Bearer {instance.secret}"}) as answer:
        return (await read_body(answer, _MOST_BYTES)).decode(answer.charset or "utf-8")


class MetricsReader:
    """A reader of the metrics of instances. It keeps what it finds in their ``kv_use`` and ``prefill_tokens_per_s``."""

    def __init__(self, instances: Instances) -> None:
        self._instances = instances

    async def run(self) -> None:
        """Read metrics until cancelled: of each instance on its own, so that one that hangs holds up no other."""
        reading: dict[str, asyncio.Task[None]] = {}
        async with ClientSession(timeout=ClientTimeout(total=2.0)) as session, asyncio.TaskGroup() as tasks:
            while True:
                reading = {name: task for name, task in reading.items() if not task.done()}
                for instance in self._instances.all():
                    if instance.running and instance.port is not None and instance.id not in reading:
                        reading[instance.id] = tasks.create_task(self._read(session, instance))
                await asyncio.sleep(_PAUSE_S)

    async def _read(self, session: ClientSession, instance: RunningInstance) -> None:
        try:
            found = engine_gauges(await read_page(session, instance, "/metrics"))
        except UNREADABLE as error:
            logger.debug("the metrics of %s could not be read: %s", instance.id, error)
            return
        instance.kv_use = min(found[_USED] / found[_ROOM], 1.0) if found[_ROOM] else 0.0
        instance.prefill_tokens_per_s = found[_RATE] or instance.prefill_tokens_per_s


def engine_gauges(metrics: str) -> dict[str, float]:
    """Return the gauges of an engine that are read here, from metrics in Prometheus' format. 0 for those not there.

    Raises ValueError for a value that is no number of at least 0.
    """
    found = dict.fromkeys((_ROOM, _USED, _RATE), 0.0)
    for line in metrics.splitlines():
        sample, _, value = line.rpartition(" ")
        name = sample.partition("{")[0]
        if name in found:
            found[name] = float(value)
            if not 0 <= found[name] < math.inf:
                raise ValueError(f"expected a number of at least 0 for {name}, found {value}")
    return found


class ReadinessReader:
    """A reader of the probes of instances that start. It sets ``answers`` once the engine has all of the weights."""

    def __init__(self, instances: Instances) -> None:
        self._instances = instances

    async def run(self) -> None:
        """Probe until cancelled."""
        async with ClientSession(timeout=ClientTimeout(total=2.0)) as session:
            for count in itertools.count():
                due = [one for one in self._instances.all() if self._is_due(one, count)]
                await asyncio.gather(*(self._probe(session, one) for one in due))
                await asyncio.sleep(_PROBE_S)

    @staticmethod
    def _is_due(instance: RunningInstance, count: int) -> bool:
        if instance.answers or instance.port is None or instance.failure is not None:
            return False
        return time.monotonic() - instance.since_s < _START_S or count % _SELDOM == 0

    @staticmethod
    async def _probe(session: ClientSession, instance: RunningInstance) -> None:
        try:
            async with session.get(f"http://127.0.0.1:{instance.port}/readyz") as answer:
                instance.answers = answer.status == 200
        except UNREADABLE as error:
            logger.debug("%s could not be probed: %s", instance.id, error)


class TimelineReader:
    """A reader of timelines. It reads an instance's until the start is known, and a group's until the sharing ends."""

    def __init__(self, instances: Instances) -> None:
        self._instances = instances
        self._first_read_at: dict[str, float] = {}
        self._last_read_at: dict[str, float] = {}

    async def run(self) -> None:
        """Read timelines until cancelled."""
        async with ClientSession(timeout=ClientTimeout(total=2.0)) as session:
            while True:
                # At the same time, so that one that hangs does not hold up the others.
                due = [instance for instance in self._instances.all() if self._is_due(instance)]
                await asyncio.gather(*(self._read(session, instance) for instance in due))
                known = {instance.id for instance in self._instances.all()}
                self._first_read_at = {name: at for name, at in self._first_read_at.items() if name in known}
                self._last_read_at = {name: at for name, at in self._last_read_at.items() if name in known}
                await asyncio.sleep(_SOON_S)

    def _is_due(self, instance: RunningInstance) -> bool:
        known = instance.start is not None and "decode_s" in instance.start
        shares = instance.worker is not None and instance.worker.is_followed and instance.group_state not in _ENDS
        if instance.port is None or instance.failure is not None or not (shares or not known):
            return False
        now = asyncio.get_running_loop().time()
        first = self._first_read_at.setdefault(instance.id, now)
        late = not shares and now - first > _START_S
        if late and instance.start is not None:
            return False  # it has its first token, but decodes too little to measure a step
        if late or (instance.group_state == "prefilling" and not instance.is_released):  # perhaps for hours
            return now - self._last_read_at.get(instance.id, 0.0) >= _LATER_S
        return True

    async def _read(self, session: ClientSession, instance: RunningInstance) -> None:
        self._last_read_at[instance.id] = asyncio.get_running_loop().time()
        try:
            stages = json.loads(await read_page(session, instance, "/timeline"))["stages"]
            start = start_times(stages, instance.first_request_ns)
            states = [stage["name"] for stage in stages if stage["name"] in _STATES]
        except UNREADABLE as error:
            logger.debug("the timeline of %s could not be read: %s", instance.id, error)
            return
        instance.start = start or instance.start
        instance.group_state = states[-1] if states else instance.group_state
        instance.has_prefilled |= "prefilling" in states
        if instance.group_state == "released":
            self._instances.note_released(instance)


def start_times(stages: Sequence[Mapping[str, Any]], first_request_ns: int | None) -> dict[str, float] | None:
    """Return how long a start took, by the stages of its instance's timeline. None before the first token.

    ``first_request_ns`` is when the first request came, by the monotonic clock. All results are in seconds:

    - ``ttft_s``: to the first token. 0 if the request came only after the engine could have computed.
    - ``begins_s``: until the skeleton was there.
    - ``prefill_s``: the first forward without its waits for weights. If the request did not come late, also the time
      between the weights (and the group) being there and that forward.
    - ``decode_s``: a step that only decodes, through all workers. Missing until some of them have run.
    """
    own = [stage for stage in stages if not str(stage["process"]).startswith("worker ")]

    def first(name: str, edge: str) -> float | None:
        return next((stage[edge] / 1e9 for stage in own if stage["name"] == name), None)

    began, token = first("exec", "start_ns"), first("first_token", "start_ns")
    forward, computed = first("first_forward", "start_ns"), first("first_forward", "end_ns")
    if began is None or token is None or forward is None or computed is None:
        return None
    # Computing was possible after the first load. For a group's leader that is the load of its own layers.
    loaded = first("load", "end_ns") or forward
    could = max(loaded, first("skeleton", "end_ns") or 0.0, first("form", "end_ns") or 0.0)
    waits = sum(stage["duration_ms"] for stage in own if stage["name"] == "wait") / 1e3
    waited_for = first_request_ns is not None and first_request_ns / 1e9 <= could
    decodes = next((stage["detail"]["step_ms"] / 1e3 for stage in own if stage["name"] == "decodes"), None)
    return {
        "ttft_s": token - began if waited_for else 0.0,
        "begins_s": (first("skeleton", "end_ns") or forward) - began,
        "prefill_s": max(computed - forward - waits, 0.0) + (max(forward - could, 0.0) if waited_for else 0.0),
        **({} if decodes is None else {"decode_s": decodes}),
    }


__all__ = ["MetricsReader", "ReadinessReader", "TimelineReader", "engine_gauges", "read_page", "start_times"]
