"""Dispatch: the queues of requests, and the choice of an instance for each.

A request waits in its model's queue until an instance has room for it: first come, first served. It gets the instance
with the least work, that for its own prompt included, whose beginning an instance may have computed. Models share the
places to wait fairly. When all places are taken, the model with the longest queue gives up its newest request for a
request of a model with a shorter queue.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from .call import PROMPT_BYTES
from .faults import Fault
from .metrics import Metrics
from .prefixes import PIECE_BYTES, Prefixes
from .routes import READY, STARTING, DeployedModel, Instance, Routes

_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_LEAST_RETRY_S, _LONGEST_RETRY_S = 1.0, 60.0


@dataclass(eq=False, slots=True)
class Lease:
    """A request's place at an instance. ``cost`` is in sequences."""

    model: str
    instance: Instance
    cost: float


@dataclass(eq=False, slots=True)
class _Waiter:
    future: asyncio.Future[Lease]
    cost: float
    avoid: frozenset[str]
    current: bool  # for instances of the current revision alone
    prefix: tuple[bytes, ...]
    since: float = field(default_factory=time.monotonic)


@dataclass(slots=True)
class _Model:
    deployed: DeployedModel
    waiting: deque[_Waiter] = field(default_factory=deque)


@dataclass(slots=True)
class _Standing:
    """The requests that this gateway has at an instance, and whether the instance should get more.

    ``work`` is in sequences; ``paused_until`` is by the monotonic clock.
    """

    instance: Instance | None = None
    work: float = 0.0
    requests: int = 0
    paused_until: float = 0.0
    pause_s: float = 0.0
    lost: bool = False


class Dispatch:
    """The queues of all models, and the work of all instances. Use it in one event loop only."""

    def __init__(self, max_waiting: int, metrics: Metrics, wake: Callable[[], None]) -> None:
        self._max_waiting = max_waiting
        self._metrics = metrics
        self._wake = wake  # called when a request has to wait, to report it to the controller
        self._models: dict[str, _Model] = {}
        self._adapters: dict[str, str] = {}  # name → name of the model
        self._early: dict[asyncio.Future[None], None] | None = {}  # requests before the first routes; None: they came
        self._standings: dict[str, _Standing] = {}
        self._prefixes = Prefixes()
        self.instances: dict[str, Instance] = {}  # by id

    # The routes

    def update(self, routes: Routes) -> None:
        """Use these routes from now on. Waiting requests for a model that is gone get 404."""
        early, self._early = self._early or {}, None
        for request in early:
            if not request.done():
                request.set_result(None)
        for name in set(self._models) - set(routes.models):
            for waiter in self._models.pop(name).waiting:
                _refuse(waiter, unknown_model(name))
        for name, deployed in routes.models.items():
            if name in self._models:
                self._models[name].deployed = deployed
            else:
                self._models[name] = _Model(deployed)
        self._adapters = {adapter: name for name, found in routes.models.items() for adapter in found.adapters}
        self.instances = routes.instances()
        for key in set(self._standings) - set(self.instances):
            if not self._standings[key].requests:
                del self._standings[key]
        for name in self._models:
            self._advance(name)

    def deployed(self, name: str) -> DeployedModel:
        """Return the model of this name, or the model that has an adapter of this name. Raises Fault 404."""
        found = self._models.get(name) or self._models.get(self._adapters.get(name, ""))
        if found is None:
            raise unknown_model(name)
        return found.deployed

    # Requests

    async def wait_for_routes(self, deadline: float) -> None:
        """Wait until the first routes are there, in order. Raises Fault 503.

        ``deadline`` is by the monotonic clock. As many requests may wait as for instances.
        """
        if self._early is None:
            return
        if len(self._early) >= self._max_waiting:
            raise _unreached(f"yet, and {len(self._early)} requests wait for that, as many as may")
        waiting = asyncio.get_running_loop().create_future()
        self._early[waiting] = None
        try:
            async with asyncio.timeout_at(deadline):
                await waiting
        except TimeoutError:
            raise _unreached("in time") from None
        finally:
            if self._early is not None:
                del self._early[waiting]

    async def lease(
        self,
        name: str,
        cost: float,
        *,
        avoid: frozenset[str],
        deadline: float,
        first: bool = False,
        current: bool = False,
        prefix: tuple[bytes, ...] = (),
    ) -> Lease:
        """Wait for a place at an instance, preferably one whose id is not in ``avoid``. Give it back with ``release``.

        ``cost`` is in sequences, and ``deadline`` by the monotonic clock. With ``first``, the request waits in front of
        all others. With ``current``, it waits for an instance of the deployment's current revision, and others that do
        not go before it meanwhile. ``prefix`` is that of the prompt (``prompt_prefix``). Raises Fault 404, 429 or 503.
        """
        if name not in self._models:
            raise unknown_model(name)
        model = self._models[name]
        waiter = _Waiter(asyncio.get_running_loop().create_future(), cost, avoid, current, prefix)
        if first:
            model.waiting.appendleft(waiter)
        else:
            self._make_room(name)
            model.waiting.append(waiter)
        self._advance(name)
        if not waiter.future.done():
            self._wake()
        try:
            async with asyncio.timeout_at(deadline):
                return await waiter.future
        except BaseException as error:
            if waiter in model.waiting:
                model.waiting.remove(waiter)
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                self.release(waiter.future.result())  # the place was given just when the request ended
            self._advance(name)  # the next requests may need less room
            if isinstance(error, TimeoutError):
                raise self._too_late(name) from None
            raise

    def release(self, lease: Lease) -> None:
        """Give up a place."""
        standing = self._standings.get(lease.instance.id)
        if standing is not None:
            standing.work -= lease.cost
            standing.requests -= 1
            if not standing.requests:
                standing.work = 0.0
                if lease.instance.id not in self.instances:  # if it comes back with its node, it starts afresh
                    del self._standings[lease.instance.id]
        self._advance(lease.model)

    def pause(self, instance_id: str) -> None:
        """Send nothing to an instance for a while, because it could not take a request. The pause doubles each time."""
        standing = self._standings.setdefault(instance_id, _Standing())
        if standing.paused_until > time.monotonic():
            return
        standing.pause_s = min(max(2 * standing.pause_s, _LEAST_PAUSE_S), _LONGEST_PAUSE_S)
        standing.paused_until = time.monotonic() + standing.pause_s
        asyncio.get_running_loop().call_later(standing.pause_s + 0.001, self._advance_all)

    def answered(self, instance_id: str) -> None:
        """Note that an instance has answered, so that its next pause is short again."""
        standing = self._standings.get(instance_id)
        if standing is not None:
            standing.pause_s = 0.0

    def set_lost(self, instance_id: str, lost: bool) -> None:
        """Set whether an instance is lost. A lost one gets no requests."""
        standing = self._standings.setdefault(instance_id, _Standing())
        standing.lost = lost
        if not lost:
            self._advance_all()

    def refuse_waiting(self, fault: Fault) -> None:
        """End all waiting requests with this fault."""
        for request in self._early or ():
            if not request.done():
                request.set_exception(fault)
        for model in self._models.values():
            for waiter in model.waiting:
                _refuse(waiter, fault)

    # Views for other parts

    def busy(self) -> list[Instance]:
        """Return the instances that work on requests of this gateway."""
        return [found.instance for found in self._standings.values() if found.requests and found.instance]

    def waiting(self, name: str) -> int:
        return len(self._models[name].waiting) if name in self._models else 0

    def longest_wait_s(self, name: str) -> float:
        """Return how long the request of a model has waited that waits for the longest. 0 if none waits."""
        now = time.monotonic()
        return now - min((waiter.since for waiter in self._models[name].waiting), default=now)

    def gauges(self) -> dict[str, dict[str, float]]:
        """Return waiting and running requests, and ready and starting instances: name of the gauge → model → value."""
        found: dict[str, dict[str, float]] = {
            name: {} for name in ("waiting", "running", "ready_instances", "starting_instances")
        }
        for name, model in self._models.items():
            found["waiting"][name] = len(model.waiting)
            found["running"][name] = sum(self._requests(one.id) for one in model.deployed.instances)
            for state in (READY, STARTING):
                count = sum(one.state == state for one in model.deployed.instances)
                found[f"{state}_instances"][name] = count
        return found

    def _requests(self, instance_id: str) -> int:
        standing = self._standings.get(instance_id)
        return 0 if standing is None else standing.requests

    # How the queues move

    def _advance_all(self) -> None:
        for name in self._models:
            self._advance(name)

    def _advance(self, name: str) -> None:
        model = self._models.get(name)
        if model is None:
            return
        passed: list[_Waiter] = []
        while model.waiting:
            waiter = model.waiting[0]
            instance = None if waiter.future.done() else self._choose(model.deployed, waiter)
            if instance is None and not waiter.future.done():
                if not (waiter.current and model.deployed.is_replacing):
                    break
                passed.append(waiter)
            model.waiting.popleft()
            if instance is not None:
                standing = self._standings.setdefault(instance.id, _Standing())
                standing.instance = instance
                standing.work += waiter.cost
                standing.requests += 1
                self._prefixes.note(waiter.prefix, instance.id)
                waiter.future.set_result(Lease(name, instance, waiter.cost))
        model.waiting.extendleft(reversed(passed))

    def _choose(self, deployed: DeployedModel, waiter: _Waiter) -> Instance | None:
        """Return the instance with the least work that has room, or None. Instances to avoid come last."""
        now = time.monotonic()
        concurrency, room = deployed.concurrency, deployed.room_for(waiter.cost)
        computed = self._prefixes.pieces(waiter.prefix)
        best: tuple[bool, float, str] | None = None
        chosen = None
        for instance in deployed.instances:
            if instance.state != READY or (waiter.current and instance.revision != deployed.revision):
                continue
            standing = self._standings.get(instance.id)
            work = 0.0
            if standing is not None:
                work = standing.work
                full = standing.requests and work + room > concurrency
                if full or standing.lost or standing.paused_until > now:
                    continue
            saved = computed.get(instance.id, 0) * PIECE_BYTES / PROMPT_BYTES
            rank = (instance.id in waiter.avoid, work - saved, instance.id)
            if best is None or rank < best:
                best, chosen = rank, instance
        return chosen

    def _make_room(self, name: str) -> None:
        """Make a place to wait for a request of a model, by taking one from the model with the longest queue.

        Raises Fault if no queue is longer than this model's would be.
        """
        if sum(len(model.waiting) for model in self._models.values()) < self._max_waiting:
            return
        longest = max(self._models, key=self.waiting)
        if self.waiting(longest) <= self.waiting(name) + 1:
            raise self._shed(name)
        _refuse(self._models[longest].waiting.pop(), self._shed(longest))

    def _retry_after_s(self, name: str) -> float:
        rate = self._metrics.of(name).finished.per_s()
        wait_s = (self.waiting(name) + 1) / rate if rate else 2.0
        return min(max(wait_s, _LEAST_RETRY_S), _LONGEST_RETRY_S)

    def _shed(self, name: str) -> Fault:
        self._metrics.of(name).shed += 1
        waiting = self.waiting(name)
        ready = name in self._models and any(i.state == READY for i in self._models[name].deployed.instances)
        if ready:
            message = f"{waiting} requests for {name!r} wait already, as many as may; try again later"
            return Fault(429, message, code="overloaded", retry_after_s=self._retry_after_s(name))
        message = f"{name!r} is being brought up, and {waiting} requests wait for it, as many as may; try again later"
        return Fault(503, message, code="not_ready", retry_after_s=self._retry_after_s(name))

    def _too_late(self, name: str) -> Fault:
        message = f"no instance of {name!r} could take the request in time; try again later"
        return Fault(503, message, code="not_ready", retry_after_s=self._retry_after_s(name))


def unknown_model(name: str) -> Fault:
    shown = name if len(name) <= 80 else name[:79] + "…"
    return Fault(404, f"the model {shown!r} does not exist", code="model_not_found", param="model")


def _unreached(when: str) -> Fault:
    """Return what a request gets for which the controller has sent no routes, ``when`` it was to."""
    text = f"this gateway has not reached the cluster's controller {when}; try again"
    return Fault(503, text, code="not_ready", retry_after_s=_LEAST_RETRY_S)


def _refuse(waiter: _Waiter, fault: Fault) -> None:
    if not waiter.future.done():
        waiter.future.set_exception(fault)
