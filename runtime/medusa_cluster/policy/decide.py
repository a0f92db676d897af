"""One tick of the cluster: from its state to decisions.

The controller calls ``decide`` a few times a second, and so does the simulator. The steps, in this order: how many
instances each model needs, what ends, where the others start, what the parameter pool lacks, who reads from whom.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from .accelerators import needed_bytes
from .claims import Shortage, request
from .counting import NO_LOAD, CountMemory, InstanceCounter, RoleCount, ends_first
from .fetches import Fetches, is_target
from .index import Index
from .live import LivePairs
from .moves import Moves
from .placement import Placement
from .pool import restore_touched
from .replacement import CHANGED, can_resume, dispensable, place, replacement, why
from .scaling import Bounds, Turn
from .schemes import Schemes
from .sharing import share
from .sizing import Scheme, parts
from .spare import IdleNodes, give_back, take_back
from .state import (
    ChangeRole,
    ClusterState,
    Consolidate,
    Decision,
    Deployment,
    Instance,
    RequestNodes,
    ResumeInstance,
    SetSpare,
    StartInstance,
    StopInstance,
)
from .turns import TURN_S, turn
from .waiting import Wait, waits

_NONE_MISSING = RequestNodes(0)


@dataclass(frozen=True, slots=True)
class Options:
    """The parts of the policy that can be switched on and off, by a controller or by an experiment."""

    bounds: Bounds = field(default_factory=Bounds)
    pool: bool = True  # keep a copy of each deployed model in the cluster
    from_peers: bool = True  # read weights from other nodes; else from the store alone
    forwarding: bool = True  # chains; else each target reads from a complete copy
    contention_aware: bool = True  # start where nothing else is fetched, and make no fetch late
    live: bool = False  # a new instance relieves a loaded one while its layers arrive, if an SLO needs that
    from_devices: bool = False  # each device that has a model sends its part; else host memory sends
    largest_group: int = 1  # workers that start a model together
    follows_memory: bool = False  # a worker with a part of the memory has a part of the computing power
    prescale: bool = True  # decode instances with prefill instances; else by their KV blocks alone
    hop_s: float = 0.0005  # between two workers
    paced_fraction: float = 0.85  # of a link, for weights beside serving traffic
    drain_s: float = 30.0
    resume: bool = True  # let instances that finish their requests go on, before others start
    ends_starts: bool = True  # end instances that still start, where the load needs fewer; else those that are ready
    turn_s: float | None = TURN_S  # how long a busy model keeps its place; None: names decide who has one
    least_nodes: int | None = None  # that are never given back to an autoscaler; None: there is none, nodes stay
    spare_after_s: float = 30.0  # without an instance, after which a node is given back


_BARRED_S = 600.0  # for which a model that found free GPUs too full takes no share from others
_MOST_MOVES = 4  # ticks in which instances make room for a model that still finds none, before it is barred


@dataclass(frozen=True)
class Memory:
    """The memory that one call of ``decide`` leaves for the next. A restarted controller begins with an empty one."""

    counted: CountMemory = field(default_factory=CountMemory)
    deadlines_s: Mapping[tuple[str, str], float] = field(default_factory=dict)  # of fetches, by node and URL
    consolidated: frozenset[str] = frozenset()  # groups
    requested: RequestNodes | None = _NONE_MISSING  # of the autoscaler; None: it may remember an earlier wish
    idle: IdleNodes = field(default_factory=IdleNodes)
    waiting: Mapping[str, Wait] = field(default_factory=dict)  # models that should have an instance and find no place
    barred: Mapping[str, float] = field(default_factory=dict)  # models that take no share from others, until when
    moves: Mapping[str, int] = field(default_factory=dict)  # waiting models, with the ticks that made room for them
    index: Index = field(default_factory=Index, compare=False)  # follows from the state; kept because it is large


def decide(
    state: ClusterState, now_s: float, memory: Memory, options: Options | None = None
) -> tuple[list[Decision], Memory]:
    """Return what to do now, in the order in which to do it, and the memory for the next call.

    Deterministic. ``now_s`` is on the clock of the state's times. The controller may drop a memory and begin anew.
    """
    memory.index.update(state.nodes, state.changed)
    tick = _Tick(state, now_s, memory, options or Options())
    return tick.run()


class _Tick:
    def __init__(self, state: ClusterState, now_s: float, memory: Memory, options: Options) -> None:
        self._state, self._now_s, self._memory, self._options = state, now_s, memory, options
        self._index = memory.index
        self._catalog = memory.index.catalog(state.deployments)
        self._placement = Placement(
            state.nodes,
            memory.index,
            self._catalog.by_url,
            state.deployments,
            self._catalog.most_devices,
            now_s,
            memory.deadlines_s,
            contention_aware=options.contention_aware,
        )
        self._fetches = Fetches(
            state.nodes,
            memory.index,
            self._catalog.by_url,
            from_peers=options.from_peers,
            forwarding=options.forwarding,
        )
        self._schemes = Schemes(
            state,
            memory.index,
            self._placement,
            self._fetches,
            hop_s=options.hop_s,
            follows_memory=options.follows_memory,
            largest_group=options.largest_group,
        )
        self._counting = InstanceCounter(
            state, memory.index, self._catalog, now_s, memory.counted, options.bounds, prescale=options.prescale
        )
        self._deadlines = {key: at for key, at in memory.deadlines_s.items() if key in memory.index.arriving}
        self._starts: list[StartInstance] = []
        self._moves = Moves(state, memory.index, self._placement)
        self._stopped: dict[str, str] = {}  # instance → node
        self._unable: set[str] = set()  # models without an instance that could start nowhere if all others ended
        self._given_up: frozenset[str] = frozenset()  # instances whose places others need
        self._given_room: set[str] = set()  # models for which instances make room in this tick
        self._decisions: list[Decision] = []

    def run(self) -> tuple[list[Decision], Memory]:
        by_model = self._counting.counts()
        counted = self._counting.remembered()
        for prefill, decode in (roles for roles in by_model.values() if len(roles) == 2):
            self._turn(prefill, decode)
        counts = [count for roles in by_model.values() for count in roles]
        asked = {count.deployment.name: count for count in counts if count.wanted and self._lacks(count)}
        shared = share(counts, self._index, self._placement, asked, self._may_start, self._turn_of)
        self._given_up, self._given_room = shared.given_up, set(shared.given_room)
        nodes, requested, idle = self._nodes(shared.shortages)
        changes = self._keep_pool()
        for count in sorted(counts, key=self._choice):
            self._adjust(count)
        self._end_orphans()
        slower = self._fetches.paces(self._options.paced_fraction)
        groups = self._consolidate()
        fetches = [*self._fetches.repair(), *self._fetches.decide()]
        decisions: list[Decision] = [
            *slower,
            *changes,
            *fetches,
            *self._paired(counts),
            *self._decisions,
            *groups,
            *nodes,
        ]
        if requested != self._memory.requested:
            decisions.append(requested)
        waiting = self._waiting(asked)
        moves = {name: self._memory.moves.get(name, 0) + (name in self._given_room) for name in waiting}
        consolidated = self._memory.consolidated | {group.group for group in groups}
        memory = Memory(
            counted,
            self._deadlines,
            frozenset(consolidated & self._index.groups.keys()),
            requested,
            idle,
            waiting,
            self._barred(waiting, {name for name, count in moves.items() if count >= _MOST_MOVES}),
            {name: count % _MOST_MOVES for name, count in moves.items()},
            self._index,
        )
        return decisions, memory

    # How many.

    def _turn(self, prefill: RoleCount, decode: RoleCount) -> None:
        """Turn prefill instances that can be spared, and have the weights, into decode instances.

        A new decode instance would load its weights over a link on which keys and values arrive (BlitzScale §5.4). The
        paper turns any prefill instance. When prompts wait for prefill, that makes the slowest first tokens several
        times slower.
        """
        while self._options.live and decode.current < decode.wanted:
            if prefill.ready <= (max(prefill.least, 1) if decode.current else 0):
                break  # without one that decodes, the last one that prefills does it
            chosen = min(
                (instance for instance in prefill.instances if instance.state == "ready" and instance.full),
                key=lambda instance: (instance.running, instance.id),
            )
            prefill.instances.remove(chosen)
            prefill.current, prefill.ready, decode.current = prefill.current - 1, prefill.ready - 1, decode.current + 1
            self._decisions.append(ChangeRole(chosen.id, chosen.node, "decode", "decode instances are missing"))

    def _nodes(self, shortages: list[Shortage]) -> tuple[list[SetSpare], RequestNodes, IdleNodes]:
        """Take back nodes with slots that are short, or give one back; and return what nodes there should be.

        None are asked for unless slots are missing, else all that are there are counted: those that drain are nodes to
        Ray, too. Those that join are among the ones that are asked for.
        """
        state, options = self._state, self._options
        if shortages:
            there = [node for node in state.nodes.values() if node.state != "lost"]
            back = [] if options.least_nodes is None else take_back(state.nodes, shortages)
            return back, request(shortages, there), IdleNodes()
        if options.least_nodes is None:
            return [], _NONE_MISSING, IdleNodes()
        changes, idle = give_back(
            state.nodes,
            self._index,
            self._memory.idle,
            self._now_s,
            least=options.least_nodes,
            after_s=options.spare_after_s,
        )
        return changes, _NONE_MISSING, idle

    # Ends and starts.

    def _choice(self, count: RoleCount) -> tuple[bool, bool, int, int]:
        """Return a sort key: models that need one kind of node first, then those for which few places will do."""
        deployment = count.deployment
        differ = sum(number > 0 for number in self._index.sizes.values()) > 1
        either = deployment.device == "auto" and deployment.devices == 1 and self._index.is_mixed
        size = needed_bytes(deployment) if differ else 0
        return not deployment.device_kind, either, -deployment.devices, -size

    def _adjust(self, count: RoleCount) -> None:
        surplus = count.current - count.wanted
        if count.outdated and count.wanted:
            self._replace(count)
        elif surplus > 0:
            self._end(count, surplus)
        elif surplus < 0:
            self._start(count, -surplus)

    def _replace(self, count: RoleCount) -> None:
        deployment, step = count.deployment, replacement(count, self._given_up)
        for instance, reason in step.ends:
            self._stop(instance, reason)
        if step.missing:
            self._start(count, step.missing)
        if not step.next:
            return
        node = place(self._placement, deployment, step.next, self._fetches.target(deployment.url))
        if node is not None:
            if self._resume(count, 1):
                self._start_on(count, node, why(step.next[0]))
        elif deployment.size_bytes and not self._ends(deployment.name):  # of size 0: perhaps it cannot be read
            first = min(step.next, key=dispensable)
            self._stop(first, f"{why(first)}, and there is no room for both")

    def _ends(self, model: str) -> bool:
        """Return whether an instance of a model ends, and leaves a place soon."""
        return any(instance.state == "draining" for instance in self._index.instances.get(model, {}).values())

    def _end(self, count: RoleCount, number: int) -> None:
        singles = [instance for instance in count.instances if instance.group is None]
        groups = {instance.group for instance in count.instances if instance.group is not None}
        if not self._options.ends_starts and count.wanted > 0:
            singles = [instance for instance in singles if instance.state == "ready"]
            number = min(number, max(len(singles) - 1, 0))

        def order(one: Instance) -> tuple[Any, ...]:
            return one.id not in self._given_up, *dispensable(one)

        for instance in sorted(singles, key=order)[:number]:
            why = "another model needs its place" if instance.id in self._given_up else "the load needs fewer"
            self._stop(instance, why)
            number -= 1
        if number > 0 and count.wanted == 0:
            for instance in count.instances:
                if instance.group in groups:
                    self._stop(instance, "nobody uses the model")

    def _stop(self, instance: Instance, reason: str) -> None:
        if instance.id in self._stopped:
            return
        self._stopped[instance.id] = instance.node
        node = self._state.nodes.get(instance.node)
        drain_s = self._options.drain_s if node is None or node.drain_s is None else node.drain_s
        self._decisions.append(StopInstance(instance.id, instance.node, drain_s, reason))

    def _end_orphans(self) -> None:
        """End instances of removed and changed models, and those of nodes that drain once others serve."""
        for instance in self._index.changed.values():
            deployment = self._state.deployments.get(instance.model)
            if instance.state != "draining" and deployment is not None and ends_first(instance, deployment):
                self._stop(instance, CHANGED)
        staying, leaving = self._index.instances, self._index.leaving
        for model in (staying.keys() | leaving.keys()) - self._state.deployments.keys():
            for instance in (*staying.get(model, {}).values(), *leaving.get(model, {}).values()):
                if instance.state != "draining":
                    self._stop(instance, "the model was removed")
        for model in leaving.keys() & self._state.deployments.keys():
            load = self._state.loads.get(model, NO_LOAD)
            there = staying.get(model, {}).values()
            serves = any(instance.state == "ready" and instance.role != "prefill" for instance in there)
            if serves or not (load.waiting or load.running or self._state.deployments[model].min):
                for instance in leaving[model].values():
                    if instance.state != "draining":
                        self._stop(instance, "its node drains")

    def _resume(self, count: RoleCount, number: int) -> int:
        """Let instances go on that finish their requests before they end: they have the weights and a device.

        Returns how many are still missing. Those with the fewest requests go first (the router of BlitzScale).
        """
        if not self._options.resume or number <= 0:
            return number
        deployment = count.deployment
        ending = [
            instance
            for instance in self._index.instances.get(deployment.name, {}).values()
            if instance.state == "draining" and instance.running and can_resume(instance, count)
        ]
        ending.sort(key=lambda instance: (instance.running, instance.id))
        for instance in ending[:number]:
            self._decisions.append(ResumeInstance(instance.id, instance.node, "the load needs it again"))
        return number - len(ending[:number])

    def _start(self, count: RoleCount, number: int) -> None:
        deployment = count.deployment
        number = self._resume(count, number)
        cold = count.ready == 0 and count.role == "both" and self._options.largest_group > 1
        scheme = _repeated(count) if cold else None
        while number > 0:
            if scheme is None or not all(self._placement.can_hold(node, deployment) for node in scheme.nodes):
                scheme = self._schemes.choose(deployment, number) if cold else None
            # Else the next group stands on the same nodes: those fetch the same layers, once for all groups.
            if scheme is not None and scheme.size > 1:
                self._start_group(count, scheme)
                number -= scheme.full
                continue
            meets = scheme is not None and scheme.meets and self._placement.can_hold(scheme.nodes[0], deployment)
            if scheme is not None and meets and self._index.is_mixed:
                node: str | None = scheme.nodes[0]  # the placement would prefer an accelerator, which may be late
            else:
                node = self._placement.choose(deployment, self._fetches.target(deployment.url))
            if node is None:
                if not self._is_barred(deployment.name):
                    for instance, reason in self._moves.make_room(deployment, number, self._stopped):
                        self._stop(instance, reason)
                        self._given_room.add(deployment.name)
                return
            if count.role == "prefill" and not self._has_partner(deployment, node):
                return
            predicted_s = scheme.ttft_s if scheme is not None and scheme.nodes == (node,) else 0.0
            self._start_on(count, node, self._reason(count), predicted_s)
            number -= 1

    def _reason(self, count: RoleCount) -> str:
        if count.current >= count.deployment.min:
            return "the load needs more" if count.current else "a request waits"
        return f"it always has at least {count.deployment.min}"

    def _lacks(self, count: RoleCount) -> bool:
        """Return whether a model has no instance, or fewer than it always has. One may do the other role's work."""
        if count.deployment.disaggregated:
            return not self._index.instances.get(count.deployment.name)
        return count.current < max(count.deployment.min, 1)

    def _waiting(self, asked: Mapping[str, RoleCount]) -> dict[str, Wait]:
        """Return what the models wait for that should have an instance, and get none in this tick."""
        got = {start.model for start in self._starts}
        resumed = {decision.id for decision in self._decisions if isinstance(decision, ResumeInstance)}
        if resumed:
            got |= {one.model for ones in self._index.instances.values() for one in ones.values() if one.id in resumed}
        return waits({name: count.deployment for name, count in asked.items() if name not in got}, self._placement)

    def _turn_of(self, count: RoleCount) -> Turn:
        load = self._state.loads.get(count.deployment.name, NO_LOAD)
        return turn(count, load, self._now_s, self._options.turn_s)

    def _may_start(self, deployment: Deployment) -> bool:
        if not self._placement.may_start(deployment):
            self._unable.add(deployment.name)
        return deployment.name not in self._unable and not self._is_barred(deployment.name)

    def _is_barred(self, model: str) -> bool:
        return self._now_s < self._memory.barred.get(model, 0.0)

    def _barred(self, waiting: Mapping[str, Wait], in_vain: set[str]) -> dict[str, float]:
        """Return the models that get nothing of others, and until when. Instances made room ``in_vain`` for some.

        What other programs have of a GPU is not seen while an instance has it. So a model for which free GPUs were too
        full does not get those of others, but starts as soon as some have room.
        """
        barred = {name: at for name, at in self._memory.barred.items() if name in waiting and self._now_s < at}
        return barred | dict.fromkeys(waiting.keys() & (self._unable | in_vain), self._now_s + _BARRED_S)

    def _has_partner(self, deployment: Deployment, node: str) -> bool:
        """Return whether an instance on this node computes on the same as one that decodes, or there is none yet."""
        instances, nodes = self._index.instances.get(deployment.name, {}).values(), self._state.nodes
        decoding = {nodes[one.node].processor(deployment.device) for one in instances if one.role == "decode"}
        return not decoding or nodes[node].processor(deployment.device) in decoding

    def _start_on(self, count: RoleCount, node: str, reason: str, predicted_s: float = 0.0) -> None:
        deployment = count.deployment
        self._placement.take(node, deployment)
        if not is_target(self._index, deployment, node):
            self._fetch(deployment, node)
        start = StartInstance(self._id(deployment), deployment.name, node, count.role, reason=reason)
        self._starts.append(replace(start, ttft_s=predicted_s, device_bytes=needed_bytes(deployment)))

    def _start_group(self, count: RoleCount, scheme: Scheme) -> None:
        deployment = count.deployment
        group = f"{self._id(deployment)}g"
        for number, (node, layers) in enumerate(zip(scheme.nodes, parts(deployment.layers, scheme.size), strict=True)):
            full = number < scheme.full
            self._placement.take(node, deployment, 1 if full else scheme.size)
            arriving = self._index.holders.get(deployment.url, {}).get(node)
            if not is_target(self._index, deployment, node) and (arriving is None or arriving.layers != layers):
                self._fetch(deployment, node, scheme.size, layers)
            start = StartInstance(self._id(deployment), deployment.name, node, count.role, layers, group, full)
            reason = f"one of {scheme.size} workers, for the first token's SLO"
            needed = needed_bytes(deployment, 1 if full else scheme.size)
            self._starts.append(replace(start, reason=reason, ttft_s=scheme.ttft_s, device_bytes=needed))

    def _fetch(
        self, deployment: Deployment, node: str, workers: int = 1, layers: tuple[int, int] | None = None
    ) -> None:
        # What the first token needs beside the weights, by Eq. 5 of ParaServe: t_w, t_p and t_n.
        deadline = self._now_s + deployment.ttft_slo_s
        deadline -= self._state.loads.get(deployment.name, NO_LOAD).longest_wait_s
        measured = deployment.on(self._state.nodes[node].processor(deployment.device))
        if measured is not None:
            hop_s = self._options.hop_s if measured.hop_s is None else measured.hop_s
            deadline -= measured.times.prefill_s + (hop_s * workers if workers > 1 else 0.0)
        self._deadlines[node, deployment.url] = deadline
        self._placement.add_fetch(node, deployment.url, deployment.size_bytes / workers, deadline)
        self._fetches.request(node, deployment.url, layers=layers, reason="an instance starts")

    def _id(self, deployment: Deployment) -> str:
        return f"{deployment.name}-{int(self._now_s * 1000):x}-{len(self._starts)}"

    def _paired(self, counts: Sequence[RoleCount]) -> list[StartInstance]:
        """Return the starts, those that are to relieve another instance meanwhile with that one's id."""
        if not self._options.live:
            return self._starts
        chains, from_devices = self._fetches.chains, self._options.from_devices
        return LivePairs(self._state, self._index, chains, counts, from_devices=from_devices).paired(self._starts)

    # Pool and groups.

    def _keep_pool(self) -> list[Decision]:
        if not self._options.pool:
            return []
        found = restore_touched(self._index, self._state.nodes, self._catalog.by_url)
        busy = {name for name, _ in self._index.arriving}
        for url, node in found.fetches.items():
            if node not in busy:  # one at a time, so that starts find their links free
                self._fetches.request(node, url, pin=not self._index.is_short, reason="the parameter pool lacks it")
                busy.add(node)
        return list(found.changes)

    def _consolidate(self) -> list[Consolidate]:
        """Decide for each group that is complete whether one worker goes on alone, or several as whole instances."""
        decisions = []
        for group in sorted(self._index.groups.keys() - self._memory.consolidated):
            workers = list(self._index.groups[group].values())
            model = workers[0].model
            if not all(worker.state == "ready" for worker in workers) or model not in self._state.deployments:
                continue
            samples = self._counting.samples(model)
            needed = int(samples[0][1]) if samples else 1
            full = sorted((worker for worker in workers if worker.full), key=lambda worker: worker.layers or (0, 0))
            keep = tuple(worker.id for worker in full[: max(1, min(needed, len(full)))])
            reason = "one is enough" if len(keep) == 1 else "the load needs several"
            decisions.append(Consolidate(group, model, keep, reason))
        return decisions


def _repeated(count: RoleCount) -> Scheme | None:
    """Return the scheme of a group that is starting already, for another group on the same nodes, or None."""
    last = next((instance.group for instance in count.instances if instance.group is not None), None)
    workers = [instance for instance in count.instances if instance.group == last and last is not None]
    if not workers:
        return None
    workers.sort(key=lambda worker: worker.layers or (0, 0))
    nodes = tuple(worker.node for worker in workers)
    return Scheme(nodes, len(nodes), 0.0, 0.0, meets=True)
