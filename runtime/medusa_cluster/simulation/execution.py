"""The execution of decisions in the simulated cluster: fetches, starts, groups that become instances, ends."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..policy.state import (
    ChangeRole,
    Consolidate,
    Decision,
    Drop,
    Fetch,
    Pace,
    Pin,
    ResumeInstance,
    StartInstance,
    StopInstance,
)
from .fleet import Model
from .network import Flow, Link, call_after
from .node import SimCopy, SimInstance, SimNode, speed_of
from .serving import ServedRequest, Server, relieved_s

if TYPE_CHECKING:
    from .simulator import SimModel, Simulation


class SimExecution:
    """The instances of a simulation, and the decisions under way."""

    def __init__(self, simulation: Simulation, seed: int) -> None:
        self._sim = simulation
        self._env = simulation.env
        self.instances: dict[str, SimInstance] = {}
        self.counts: dict[str, int] = {}  # instances by model's name
        self._groups: dict[str, list[SimInstance]] = {}
        self._holders: dict[Server, list[SimInstance]] = {}
        self._random = random.Random(seed)
        self._serving = 0  # instances, and workers of groups, that serve

    def do(self, decision: Decision) -> None:
        if isinstance(decision, Fetch):
            self._fetch(decision)
        elif isinstance(decision, StartInstance):
            self._start(decision)
        elif isinstance(decision, StopInstance):
            instance = self.instances.get(decision.id)
            if instance is not None:
                self._stop(instance)
        elif isinstance(decision, ResumeInstance):
            self._resume(decision.id)
        elif isinstance(decision, Consolidate):
            self._consolidate(decision)
        elif isinstance(decision, Drop):
            self._drop(self._sim.nodes[decision.node], decision.url)
        elif isinstance(decision, Pin):
            copy = self._sim.nodes[decision.node].copies.get(decision.url)
            if copy is not None:
                copy.pinned = decision.pinned
                self.touch(self._sim.nodes[decision.node])
        elif isinstance(decision, ChangeRole):
            self._turn(self.instances[decision.id])
        elif isinstance(decision, Pace):
            node = self._sim.nodes[decision.node]
            node.show_pace(decision.bytes_per_s)
            self._sim.changed[node] = None

    def cached_bytes(self) -> int:
        """Return the bytes of weights in host memory. What arrives in devices takes none, until its instance ends."""
        return sum(
            copy.total
            for node in self._sim.nodes.values()
            for copy in node.copies.values()
            if copy.pinned or not self._sim.strategy.direct or not node.runs(copy.url)
        )

    def close(self) -> None:
        for instance in list(self.instances.values()):
            self._charge(instance)
            self._sim.outcome.device_s += self._sim.paid_s(instance.began_s)
        for node in self._sim.nodes.values():
            for copy in node.copies.values():
                self._release(copy)

    # Weights.

    def _fetch(self, fetch: Fetch) -> None:
        sim, node = self._sim, self._sim.nodes[fetch.node]
        deployment = sim.fleet.models[sim.numbers[fetch.url.removeprefix("m://")]]
        copy = node.copies.get(fetch.url)
        if copy is not None and copy.layers is not None and fetch.layers is None:
            copy.layers = None  # the rest, too
        elif copy is not None and (copy.layers is not None or copy.complete):
            self._release(copy)
            copy = None
        if copy is None:
            copy = SimCopy(fetch.url, deployment.profile.size_bytes, fetch.layers, fetch.pin, used_at_s=self._env.now)
            node.copies[fetch.url] = copy
        if copy.flow is not None:
            copy.base = copy.fetched
            sim.network.stop(copy.flow)
            copy.flow = None
        copy.pinned, copy.sources = fetch.pin or copy.pinned, fetch.sources
        copy.grouped = copy.grouped or fetch.layers is not None
        part = copy.total
        if fetch.layers is not None:
            part = round(copy.total * (fetch.layers[1] - fetch.layers[0]) / deployment.profile.layers)
        self._flow(node, copy, part - copy.base, lambda: self._on_arrived(node, copy))
        self.touch(node)

    def _flow(self, node: SimNode, copy: SimCopy, size: float, arrived: Callable[[], None]) -> None:
        sim = self._sim
        upstream: Flow | None = None
        source = sim.nodes[copy.sources[0]] if copy.sources else None
        if source is not None:
            sim.outcome.fetches += 1
            held = source.copies.get(copy.url)
            upstream = held.flow if held is not None else None
            links: tuple[Link, ...] = (source.egress, node.ingress, *self._own_links(source, copy.url))
            if source.domain and source.domain == node.domain:
                links = (Link(node.machine.fast_bytes_per_s),)
        else:
            links = (sim.store, node.ingress, node.disk)
        copy.flow = sim.network.start(links, max(size, 1.0), arrived, upstream)

    def _own_links(self, source: SimNode, url: str) -> tuple[Link, ...]:
        """Return what limits a flow from devices: the network cards of those that have the model.

        Each of a node's devices that hold the same weights sends a share of them (BlitzScale §5.1). Host memory can use
        all cards.
        """
        if not self._sim.strategy.direct:
            return ()
        name, most = url.removeprefix("m://"), source.machine.devices
        devices = sum(other.name == name and other.state == "ready" for other in source.instances.values())
        return (Link(source.machine.link_bytes_per_s * devices / most),) if 0 < devices < most else ()

    def _on_arrived(self, node: SimNode, copy: SimCopy) -> None:
        copy.base, copy.flow = copy.fetched, None
        copy.complete = copy.layers is None
        copy.sources = ()
        copy.used_at_s = self._env.now
        self.touch(node)
        then, copy.then = copy.then, []
        for call in then:
            call()
        self._sim.wake()

    def _drop(self, node: SimNode, url: str) -> None:
        copy = node.copies.pop(url, None)
        if copy is not None:
            self._release(copy)
            self.touch(node)

    def _release(self, copy: SimCopy) -> None:
        if copy.flow is not None:
            self._sim.network.stop(copy.flow)
            copy.flow = None

    def touch(self, node: SimNode) -> None:
        node.dirty = True
        self._sim.changed[node] = None

    # Starts.

    def make(self, start: StartInstance) -> SimInstance:
        sim, now = self._sim, self._env.now
        node = sim.nodes[start.node]
        instance = SimInstance(
            start.id,
            sim.numbers[start.model],
            start.model,
            node,
            now,
            now,
            start.role,
            start.layers,
            start.group,
            start.full,
            start.partner,
        )
        self.instances[start.id] = node.instances[start.id] = instance
        self.counts[start.model] = self.counts.get(start.model, 0) + 1
        sim.outcome.instances.append((now, len(self.instances)))
        self.touch(node)
        return instance

    def _start(self, start: StartInstance) -> None:
        sim, strategy = self._sim, self._sim.strategy
        instance = self.make(start)
        sim.outcome.cold_starts += 1
        if start.group is not None:
            self._groups.setdefault(start.group, []).append(instance)
        model = sim.fleet.models[instance.model]
        size = model.profile.size_bytes
        if start.layers is not None:
            size = round(size * (start.layers[1] - start.layers[0]) / model.profile.layers)
        boot = strategy.boot_s(model.on(instance.node.machine.device), size)
        copy = instance.node.copies.get(f"m://{model.name}")
        if strategy.warm:
            boot = self._load_s(instance, model, size)
        if copy is not None and copy.flow is not None and not strategy.prefetch:
            self._delay(instance.node, copy, boot)
        if start.partner is not None:
            self._relieve(instance, start.partner)
        instance.slower = self._random.lognormvariate(0.0, sim.fleet.start_spread) if sim.fleet.start_spread else 1.0
        call_after(self._env, boot * instance.slower, lambda: self._on_booted(instance))

    def _load_s(self, instance: SimInstance, model: Model, size: float) -> float:
        """Return how long weights take to the device of a process that is there.

        From host memory over the device's own link; with ``direct`` from another device of the node, or beside the
        fetch, whose bytes arrive there.
        """
        node = instance.node
        load = size / model.on(node.machine.device).stages.load_bytes_per_s
        if not self._sim.strategy.direct:
            return load
        copy = node.copies.get(f"m://{model.name}")
        if copy is not None and copy.flow is not None:
            return 0.0
        served = any(other.name == model.name and other.state == "ready" for other in node.instances.values())
        return min(load, size / node.machine.fast_bytes_per_s) if served else load

    def _delay(self, node: SimNode, copy: SimCopy, seconds: float) -> None:
        """Fetch only after the boot, as a system without a prefetcher does."""
        assert copy.flow is not None
        size = copy.flow.size
        self._sim.network.stop(copy.flow)
        copy.flow = None
        waiting = Link(1e6)  # as a flow of a few bytes, so that the copy counts as one that arrives
        copy.flow = self._sim.network.start((waiting,), seconds * 1e6, lambda: self._delayed(node, copy, size))

    def _delayed(self, node: SimNode, copy: SimCopy, size: float) -> None:
        copy.flow = None
        self._flow(node, copy, size, lambda: self._on_arrived(node, copy))
        self.touch(node)

    def _on_booted(self, instance: SimInstance) -> None:
        if instance.id not in self.instances:
            return
        copy = instance.node.copies.get(f"m://{instance.name}")
        if copy is not None and copy.flow is not None:
            copy.then.append(lambda: self._on_loaded(instance))
        else:
            self._on_loaded(instance)

    def _on_loaded(self, instance: SimInstance) -> None:
        model = self._sim.fleet.models[instance.model]
        init = self._sim.strategy.init_s(model.on(instance.node.machine.device)) * instance.slower
        call_after(self._env, init, lambda: self.begin(instance))

    def begin(self, instance: SimInstance) -> None:
        """Let an instance serve, or a group if this is its last worker to be ready."""
        if instance.id not in self.instances or instance.state == "draining":
            return
        self._set_state(instance, "ready")
        group = self._groups.get(instance.group or "", [instance])
        if any(worker.state != "ready" for worker in group):
            return
        sim = self._sim
        model = sim.models[instance.model]
        size = len(group)
        server = Server(
            self._env,
            instance.group or instance.id,
            speed_of(group, model.model, follows_memory=sim.strategy.policy.follows_memory),
            model.model.concurrency,
            sim.ended,
            size=size,
            hop_s=sim.fleet.hop_s if size > 1 else 0.0,
            batch_tokens=model.model.batch_tokens,
        )
        server.first_token = sim.first_token
        if sim.fleet.prefill_spread:
            server.slower = lambda: self._random.lognormvariate(0.0, sim.fleet.prefill_spread)
        for worker in group:
            worker.server = server
        self._serve(len(group))
        self._holders[server] = list(group)
        self._open(model, instance, server)

    def _open(self, model: SimModel, instance: SimInstance, server: Server) -> None:
        if instance.role == "decode":
            model.decoders[server.key] = server
        else:
            model.ready[server.key] = server
            if instance.role == "prefill":
                server.decoder = lambda request: self._decode(model, server, request)
            if model.model.shared_queue:
                server.pull = lambda tokens: self._sim.pull(model, tokens)
        self._decode_held(model)
        self._sim.dispatch(model)
        self._sim.wake()

    def _decode(self, model: SimModel, prefill: Server, request: ServedRequest) -> bool:
        """Give a prefilled request to a decode instance; False where it has to wait for room in one."""
        decoder = min(model.decoders.values(), key=lambda server: server.running, default=prefill)
        if decoder is not prefill and decoder.free <= 0:
            model.held.append((prefill, request))
            return False
        decoder.take_over(request)
        return True

    def _decode_held(self, model: SimModel) -> None:
        while model.held:
            prefill, request = model.held.popleft()
            if not self._decode(model, prefill, request):
                model.held.rotate(1)  # it stays the first
                return
            prefill.leave(request)

    def _relieve(self, instance: SimInstance, partner: str) -> None:
        """While the new instance loads, the partner's prefills are faster: layers run where they are (§5.2)."""
        other = self.instances.get(partner)
        if other is None or other.server is None:
            return
        self._sim.outcome.relieved += 1
        server, copy = other.server, instance.node.copies.get(f"m://{instance.name}")

        def relieved(seconds: float) -> float:
            if copy is None or instance.state != "starting" or instance.id not in self.instances:
                server.relieved = None
                return seconds
            rate = copy.flow.rate if copy.flow is not None else 0.0
            return relieved_s(seconds, copy.fetched / copy.total, rate / copy.total)

        server.relieved = relieved

    # Groups.

    def _consolidate(self, decision: Consolidate) -> None:
        """Let the kept workers fetch the layers that they lack; then each is an instance, and the others end."""
        workers = [self.instances[id] for id in self.instances if self.instances[id].group == decision.group]
        kept = [worker for worker in workers if worker.id in decision.keep]
        missing = {worker.id for worker in kept}

        def done(worker: SimInstance) -> None:
            missing.discard(worker.id)
            if not missing:
                self._split(decision.group, kept, [other for other in workers if other not in kept])

        for worker in kept:
            self._complete(worker, done)

    def _complete(self, worker: SimInstance, done: Callable[[SimInstance], None]) -> None:
        copy = worker.node.copies.get(f"m://{worker.name}")
        if copy is None or copy.complete:
            done(worker)
            return
        # Noted at the copy, as another fetch may take this one's place: an instance's, or another group's worker's.
        copy.then.append(lambda: self._complete(worker, done))
        if copy.flow is not None:
            return

        def arrived() -> None:
            copy.layers = None
            self._on_arrived(worker.node, copy)

        self._flow(worker.node, copy, copy.total - copy.base, arrived)
        self.touch(worker.node)

    def _split(self, group: str, kept: list[SimInstance], others: list[SimInstance]) -> None:
        kept = [worker for worker in kept if worker.id in self.instances]
        server = kept[0].server if kept else None
        if server is None:
            return
        model = self._sim.models[kept[0].model]
        self._groups.pop(group, None)
        self._holders.pop(server, None)
        model.ready.pop(server.key, None)
        server.key = kept[0].id
        server.become(1, 0.0, speed_of(kept[:1], model.model))
        for worker in kept:
            worker.group, worker.layers = None, None
            self._charge(worker)
            worker.since_s = self._env.now
            if worker is not kept[0]:
                worker.server = None
                self._serve(-1)
            self.touch(worker.node)
        self._holders[server] = [kept[0]]
        self._open(model, kept[0], server)
        each = server.running // len(kept)
        for worker in kept[1:]:
            self.begin(worker)
            if worker.server is not None:
                for request, left in server.give(each):
                    worker.server.take_over(request, left)
        self._sim.dispatch(model)
        for other in others:
            self._end(other)

    # Ends.

    def _stop(self, instance: SimInstance) -> None:
        self._set_state(instance, "draining")
        server = instance.server
        if server is None:
            self._end_soon(instance)
            return
        model = self._sim.models[instance.model]
        model.ready.pop(server.key, None)
        model.decoders.pop(server.key, None)
        server.pull = None
        self._decode_held(model)
        self.on_place_free(server)

    def _resume(self, instance_id: str) -> None:
        """Let an instance that drains take requests again."""
        instance = self.instances.get(instance_id)
        if instance is None or instance.state != "draining" or instance.server is None or not instance.server.running:
            return
        self._set_state(instance, "ready")
        self._sim.outcome.resumed += 1
        self._open(self._sim.models[instance.model], instance, instance.server)

    def _end_soon(self, instance: SimInstance) -> None:
        delay_s = self._sim.fleet.models[instance.model].on(instance.node.machine.device).stages.end_s
        if delay_s > 0:
            call_after(self._env, delay_s, lambda: self._end(instance))
        else:
            self._end(instance)

    def on_place_free(self, server: Server) -> None:
        """Give its place to a request that waits for one; end the instances of a server that drains and is empty."""
        for instance in self._holders.get(server, ())[:1]:
            if instance.role == "decode":
                self._decode_held(self._sim.models[instance.model])
        if server.running:
            return
        for instance in self._holders.get(server, ()):
            if instance.state == "draining":
                self._end_soon(instance)

    def _end(self, instance: SimInstance) -> None:
        sim, now = self._sim, self._env.now
        if self.instances.pop(instance.id, None) is None:
            return
        node, url = instance.node, f"m://{instance.name}"
        node.instances.pop(instance.id, None)
        self.counts[instance.name] -= 1
        if not self.counts[instance.name]:
            del self.counts[instance.name]
        if instance.group is not None and instance in self._groups.get(instance.group, ()):
            self._groups[instance.group].remove(instance)
        if instance.server is not None and not any(
            other.server is instance.server for other in self._holders.get(instance.server, ()) if other is not instance
        ):
            self._holders.pop(instance.server, None)
        if instance.server is not None:
            self._serve(-1)
        self._charge(instance)
        sim.outcome.device_s += sim.paid_s(instance.began_s)
        sim.outcome.instances.append((now, len(self.instances)))
        copy = node.copies.get(url)
        if copy is not None and not any(other.name == instance.name for other in node.instances.values()):
            copy.used_at_s = now
            partial = copy.layers is not None or copy.flow is not None
            unkept = sim.strategy.cache == "none" or (copy.grouped and not sim.strategy.caches_groups)
            if not copy.pinned and (unkept or partial):
                self._drop(node, url)
            elif not copy.pinned and sim.strategy.cache_ttl_s != float("inf"):
                call_after(self._env, sim.strategy.cache_ttl_s, lambda: self._expire(node, copy, now))
        self.touch(node)
        sim.wake()

    def _expire(self, node: SimNode, copy: SimCopy, since_s: float) -> None:
        unused = copy.used_at_s <= since_s and not node.runs(copy.url) and not copy.pinned
        if node.copies.get(copy.url) is copy and unused:
            self._drop(node, copy.url)

    def _turn(self, instance: SimInstance) -> None:
        """Turn a prefill instance, which has the weights, into a decode instance."""
        model, server = self._sim.models[instance.model], instance.server
        self._charge(instance)
        instance.role, instance.since_s = "decode", self._env.now
        self.touch(instance.node)
        if server is not None:
            model.ready.pop(server.key, None)
            server.decoder = server.pull = None
            model.decoders[server.key] = server
            self._decode_held(model)

    def _serve(self, more: int) -> None:
        self._serving += more
        self._sim.outcome.ready.append((self._env.now, self._serving))

    def _charge(self, instance: SimInstance) -> None:
        """Add the time that an instance has been in its state to what such instances cost."""
        key, sums = f"{instance.role} {instance.state}", self._sim.outcome.roles_s
        sums[key] = sums.get(key, 0.0) + self._sim.paid_s(instance.since_s)

    def _set_state(self, instance: SimInstance, state: str) -> None:
        self._charge(instance)
        instance.state, instance.since_s = state, self._env.now
        self.touch(instance.node)
