"""The load of a node's instances and what they can do (BlitzScale §5.3), from the metrics of those with requests."""

from __future__ import annotations

import asyncio
import logging
import math

from aiohttp import ClientSession, ClientTimeout

from .instance_page import UNREADABLE, read_page
from .instances import Instances, RunningInstance

logger = logging.getLogger(__name__)

_PAUSE_S = 0.5  # a reading takes some 2 ms of CPU time
_ROOM, _USED, _RATE = (f"medusa_engine_{name}" for name in ("kv_tokens", "kv_tokens_used", "prefill_tokens_per_s"))


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


__all__ = ["MetricsReader", "engine_gauges"]
