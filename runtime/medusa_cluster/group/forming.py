"""How a group comes together: every worker connects to the leader, shows that it fits, and is told the next one."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from medusa_runtime.errors import EngineError, MedusaError
from medusa_runtime.models.layer_range import LayerRange

from .identity import disagreement
from .plan import GroupPlan
from .wire.channel import Greeting, Listener, TcpChannel, connect
from .wire.link import Link
from .wire.message import Kind, packed

logger = logging.getLogger(__name__)

_LOOK_S = 0.1


@dataclass(slots=True)
class Worker:
    """A worker as its leader sees it. ``offset_ns`` is added to its clock to get the leader's."""

    rank: int
    layers: LayerRange
    place: str
    blocks: int
    channel: TcpChannel
    gathered: TcpChannel | None = None
    loaded: bool = False
    full: bool = False
    offset_ns: int = 0
    trip_ns: int = field(default=1 << 62)  # of the sample that the offset is from

    def close(self) -> None:
        self.channel.close()
        if self.gathered is not None:
            self.gathered.close()


@dataclass(slots=True)
class Formation:
    """A group that has come together: the other workers by rank, and the channel to the first of them."""

    workers: list[Worker]
    hidden: TcpChannel

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.hidden.close()


def form(
    plan: GroupPlan,
    layers: LayerRange,
    identity: Callable[[], dict[str, Any]],
    link: Link | None,
    stopped: Callable[[], bool],
) -> Formation:
    """Wait for all workers. EngineError when they do not come in time, or do not fit together."""
    greetings: queue.SimpleQueue[Greeting] = queue.SimpleQueue()
    host, port = plan.leader_place
    listener = Listener(host, port, group=plan.number, token=plan.token, accept=greetings.put, link=link)
    found: dict[int, Worker] = {}
    deadline = time.monotonic() + plan.form_s
    try:
        while len(found) < plan.size - 1:
            try:
                greeting = greetings.get(timeout=_LOOK_S)
            except queue.Empty:
                if stopped() or time.monotonic() > deadline:
                    came = f"{len(found)} of {plan.size - 1}"
                    raise EngineError(f"{came} other workers came within {plan.form_s:g} s") from None
                continue
            worker = _admit(greeting, plan, identity())
            if worker is not None:
                found.pop(worker.rank, None)  # it lost its connection and has come again
                found[worker.rank] = worker
        return _connected([found[rank] for rank in sorted(found)], plan, layers, link, stopped)
    except BaseException:
        for worker in found.values():
            worker.close()
        raise
    finally:
        listener.close()
        while not greetings.empty():
            greetings.get().channel.close()


def _admit(greeting: Greeting, plan: GroupPlan, ours: dict[str, Any]) -> Worker | None:
    """The worker that a greeting is from. EngineError when it cannot share the model with this one."""
    channel, values = greeting.channel, greeting.values
    if greeting.purpose != "steps" or not 0 < greeting.rank < plan.size:
        channel.close()
        return None
    reason = disagreement(ours, values)
    if reason is not None:
        error = EngineError(f"worker {greeting.rank} was refused: {reason}")
        try:
            channel.send(packed(Kind.ERROR, plan.number, {"code": error.code, "message": str(error)}))
            channel.flush(1.0)
        except MedusaError:
            pass
        channel.close()
        raise error
    try:
        start, stop = map(int, values["layers"])
        blocks, place = int(values["blocks"]), str(values["place"])
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        channel.close()
        raise EngineError(f"worker {greeting.rank} sent a greeting that could not be read: {error!r}") from None
    return Worker(greeting.rank, LayerRange(start, stop, int(ours["total"])), place, blocks, channel)


def _connected(
    workers: list[Worker], plan: GroupPlan, layers: LayerRange, link: Link | None, stopped: Callable[[], bool]
) -> Formation:
    ranges = [layers, *(worker.layers for worker in workers)]
    stops = [0, *(one.stop for one in ranges)]
    if [one.start for one in ranges] != stops[:-1] or stops[-1] != layers.total:
        listed = ", ".join(map(str, ranges))
        raise EngineError(f"expected workers whose layers follow one another up to {layers.total}, found {listed}")
    deadline = time.monotonic() + plan.silent_s

    def channel(worker: Worker, purpose: str) -> TcpChannel:
        return connect(
            worker.place, group=plan.number, token=plan.token, rank=0, purpose=purpose, deadline=deadline, link=link,
            stopped=stopped,
        )  # fmt: skip

    for worker in workers:
        worker.gathered = channel(worker, "blocks")
    hidden = channel(workers[0], "hidden")
    places = [*(worker.place for worker in workers[1:]), None]
    try:
        for worker, place in zip(workers, places, strict=True):
            worker.channel.send(packed(Kind.FORM, plan.number, {"next": place}))
    except BaseException:
        hidden.close()
        raise
    return Formation(workers, hidden)


__all__ = ["Formation", "Worker", "form"]
