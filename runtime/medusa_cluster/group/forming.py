"""The forming of a group: every worker connects to the leader, is checked, and learns the address of the next one."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_runtime.errors import EngineError
from medusa_runtime.models.layer_range import LayerRange

from .identity import disagreement
from .plan import GroupPlan
from .wire.channel import Greeting, Listener, TcpChannel, close_with, connect
from .wire.emulated_link import EmulatedLink
from .wire.message import Kind, json_message
from .wire.tunnel import is_store_place

logger = logging.getLogger(__name__)

_POLL_S = 0.1


@dataclass(slots=True)
class Worker:
    """A worker as its leader sees it.

    ``address`` is ``HOST:PORT`` where it listens, and ``blocks`` how many KV blocks it has. ``offset_ns`` is added to
    the worker's clock to get the leader's.
    """

    rank: int
    layers: LayerRange
    address: str
    blocks: int
    channel: TcpChannel
    cache_channel: TcpChannel | None = None  # for keys and values
    hidden_channel: TcpChannel | None = None  # for hidden states, to the first of the workers
    loaded: bool = False
    full: bool = False
    offset_ns: int = 0
    trip_ns: int = field(default=1 << 62)  # the round trip of the sample that gave the offset; the shortest counts

    def note_heartbeat(self, values: dict[str, Any]) -> None:
        """Note a worker's state from its heartbeat, and estimate the offset of its clock."""
        now = time.monotonic_ns()
        echo = values.get("echo")
        if echo is not None:
            asked, got = map(int, echo)
            sent = int(values["sent"])
            trip = (now - asked) - (sent - got)
            if trip < self.trip_ns:
                self.trip_ns = trip
                self.offset_ns = ((asked - got) + (now - sent)) // 2
        self.full = bool(values.get("full"))
        self.loaded = self.loaded or bool(values.get("loaded"))

    def close(self) -> None:
        for channel in (self.channel, self.cache_channel, self.hidden_channel):
            if channel is not None:
                channel.close()


def form(
    plan: GroupPlan,
    own: LayerRange | None,
    identity: Callable[[], dict[str, Any]],
    link: EmulatedLink | None,
    stopped: Callable[[], bool],
) -> list[Worker]:
    """Wait for all workers, and connect them. Raises EngineError if they do not come in time or do not fit together.

    ``own`` are the leader's own layers. With None, the leader computes none, and rank 0 is a worker too.
    """
    workers = _gather(plan, range(1 if own is not None else 0, plan.size), identity, link, stopped)
    ranges = [worker.layers for worker in workers]
    try:
        if own is None:
            _check_ranges(ranges)
        else:
            _check_ranges([own, *ranges])
            _connect(workers, plan, link, stopped)
        addresses = [*(worker.address for worker in workers[1:]), None]
        for worker, address in zip(workers, addresses, strict=True):
            worker.channel.send(json_message(Kind.FORM, plan.number, {"next": address}))
    except BaseException:
        for worker in workers:
            worker.close()
        raise
    return workers


def _gather(
    plan: GroupPlan,
    ranks: range,
    identity: Callable[[], dict[str, Any]],
    link: EmulatedLink | None,
    stopped: Callable[[], bool],
) -> list[Worker]:
    """Wait for the workers of these ranks. Raises EngineError if they do not come in time, or if one does not fit."""
    greetings: queue.SimpleQueue[Greeting] = queue.SimpleQueue()
    host, port = plan.leader_address
    listener = Listener(host, port, group=plan.number, access=plan.access, accept=greetings.put, link=link)
    found: dict[int, Worker] = {}
    deadline = time.monotonic() + plan.form_s
    try:
        while len(found) < len(ranks):
            try:
                greeting = greetings.get(timeout=_POLL_S)
            except queue.Empty:
                if stopped() or time.monotonic() > deadline:
                    came = f"{len(found)} of {len(ranks)}"
                    raise EngineError(f"{came} other workers came within {plan.form_s:g} s") from None
                continue
            worker = _admit(greeting, plan, ranks, identity())
            if worker is not None:
                found.pop(worker.rank, None)  # it lost its connection and has connected again
                found[worker.rank] = worker
        return [found[rank] for rank in sorted(found)]
    except BaseException:
        for worker in found.values():
            worker.close()
        raise
    finally:
        listener.close()
        while not greetings.empty():
            greetings.get().channel.close()


def _admit(greeting: Greeting, plan: GroupPlan, ranks: range, ours: dict[str, Any]) -> Worker | None:
    """Return the worker that sent a greeting, or None if it is no worker of these ranks.

    Raises EngineError if it cannot share the model with the leader.
    """
    channel, values = greeting.channel, greeting.values
    if greeting.purpose != "steps" or greeting.rank not in ranks:
        channel.close()
        return None
    reason = disagreement(ours, values)
    if reason is not None:
        error = EngineError(f"worker {greeting.rank} was refused: {reason}")
        close_with(channel, plan.number, error)
        raise error
    try:
        start, stop = map(int, values["layers"])
        blocks, address = int(values["blocks"]), plan.store_place(greeting.rank) or _host_and_port(values["place"])
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        channel.close()
        raise EngineError(f"worker {greeting.rank} sent a greeting that could not be read: {error!r}") from None
    return Worker(greeting.rank, LayerRange(start, stop, int(ours["total"])), address, blocks, channel)


def _host_and_port(place: object) -> str:
    """Return a worker's ``HOST:PORT``. Raises ValueError for anything else, such as a path to write to."""
    if type(place) is not str or is_store_place(place):
        raise ValueError(place)
    return place


def _check_ranges(ranges: Sequence[LayerRange]) -> None:
    """Raise EngineError unless the ranges follow one another, from the first layer to the last."""
    stops, total = [0, *(one.stop for one in ranges)], ranges[0].total
    if [one.start for one in ranges] != stops[:-1] or stops[-1] != total:
        listed = ", ".join(map(str, ranges))
        raise EngineError(f"expected workers whose layers follow one another up to {total}, found {listed}")


def _connect(workers: list[Worker], plan: GroupPlan, link: EmulatedLink | None, stopped: Callable[[], bool]) -> None:
    """Open the leader's connections for keys and values, to all workers, and for hidden states, to the first."""
    deadline = time.monotonic() + plan.silent_s

    def channel(worker: Worker, purpose: str) -> TcpChannel:
        return connect(
            worker.address, group=plan.number, access=plan.access, rank=0, purpose=purpose, deadline=deadline,
            link=link, stopped=stopped,
        )  # fmt: skip

    for worker in workers:
        worker.cache_channel = channel(worker, "blocks")
    workers[0].hidden_channel = channel(workers[0], "hidden")


__all__ = ["Worker", "form"]
