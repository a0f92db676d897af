"""Counts of the instances that each model has and should have, made anew only where something may have changed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .claims import Claim, bounds
from .index import Catalog, Index
from .scaling import Bounds, Monitor, prescaled, scale_target
from .state import MOST_PREFILLING, ClusterState, Deployment, Instance, Load, Role

NO_LOAD = Load()
_NEW = Monitor()


@dataclass(slots=True)
class RoleCount:
    """One role of a model: its instances and how many there should be."""

    deployment: Deployment
    role: Role
    instances: list[Instance]  # those that count: they start or are ready, on nodes that stay
    current: int = 0
    ready: int = 0
    ready_since_s: float = -math.inf  # of the last one
    wanted: int = 0
    least: int = 0  # would do
    monitor: Monitor = _NEW
    # Ready, of an older version or a deployment that has changed: they are replaced. What is in groups stays.
    outdated: list[Instance] = field(default_factory=list)

    def __post_init__(self) -> None:
        version = self.deployment.version
        for instance in self.instances:
            ready = instance.state == "ready"
            if instance.full:
                self.current += 1
                self.ready += ready
                if ready:
                    self.ready_since_s = max(self.ready_since_s, instance.since_s)
            older = instance.changed or (instance.version and instance.version != version and version)
            if older and ready and instance.group is None:
                self.outdated.append(instance)

    @property
    def is_settled(self) -> bool:
        """Whether only another load, another instance or time without requests can change what is wanted."""
        monitor = self.monitor
        return (
            self.current == self.wanted
            and monitor.spare_since_s is None
            and len(monitor.samples) == 1
            and not self.outdated
        )


@dataclass(frozen=True, slots=True)
class SettledModel:
    """A model that had as many instances as it should have, and the facts from which that followed.

    ``mark`` is the one of its instances in the index. ``kept``: an instance is there only because of a recent request.
    """

    load: Load
    mark: object
    kept: bool
    claim: Claim
    wanted: int
    monitors: tuple[tuple[Role, Monitor], ...]


@dataclass(frozen=True)
class CountMemory:
    """The memory of one tick about the models' loads. ``settled`` holds for this catalog and these options."""

    monitors: Mapping[tuple[str, Role], Monitor] = field(default_factory=dict)
    settled: Mapping[str, SettledModel] = field(default_factory=dict)
    catalog: Catalog | None = None
    options: tuple[Bounds, bool] | None = None
    at_s: float = -math.inf


def ends_first(instance: Instance, deployment: Deployment) -> bool:
    """Return whether an instance ends as soon as its deployment has changed, and not when another one replaces it.

    It does if it does not answer yet, or shares its work: what belongs to two deployments cannot do that.
    """
    alone = instance.group is None and instance.role == "both" and not deployment.disaggregated
    return instance.changed and not (instance.state == "ready" and alone)


class InstanceCounter:
    """The counts of one tick.

    A model whose load and instances are those of the last tick, and of which there was what it should have, is passed
    over: most models of a large cluster, most of the time. The result is the same as if it were counted.
    """

    def __init__(
        self,
        state: ClusterState,
        index: Index,
        catalog: Catalog,
        now_s: float,
        last: CountMemory,
        bounds: Bounds,
        *,
        prescale: bool,
    ) -> None:
        self._state, self._index, self._catalog, self._now_s = state, index, catalog, now_s
        self._last, self._bounds, self._prescale = last, bounds, prescale
        same = last.catalog is self._catalog and last.options == (bounds, prescale)
        self._known: Mapping[str, SettledModel] = last.settled if same else {}
        self._settled: dict[str, SettledModel] = {}
        self._counts: dict[str, list[RoleCount]] = {}

    def counts(self) -> dict[str, list[RoleCount]]:
        """Count the models that have requests or instances, or should have some; by name, in order."""
        state, instances = self._state, self._index.instances
        wanted: dict[Claim, int] = {}
        for name in sorted({*state.loads, *instances, *self._catalog.always}):
            deployment = state.deployments.get(name)
            if deployment is None:
                continue
            settled = self._known.get(name)
            if settled is not None and self._is_unchanged(name, settled):
                self._settled[name] = settled
                claim, number = settled.claim, settled.wanted
            else:
                self._counts[name] = self._count_roles(deployment)
                claim, number = Claim.of(deployment), sum(count.wanted for count in self._counts[name])
            if number:
                wanted[claim] = wanted.get(claim, 0) + number
        sharing = self._sharing(wanted)
        if sharing:
            for name in sharing:
                self._counts[name] = self._count_roles(state.deployments[name])
                del self._settled[name]
            self._counts = {name: self._counts[name] for name in sorted(self._counts)}
        return self._counts

    def _sharing(self, wanted: Mapping[Claim, int]) -> list[str]:
        """Return the models that are settled, but have to share slots of which there are too few."""
        short: set[Claim] = set()
        for bound in bounds(self._index.shapes, wanted):
            if sum(wanted[claim] * slots for claim, slots in bound.slots_of.items()) > bound.capacity:
                short |= bound.slots_of.keys()
        return [name for name, settled in self._settled.items() if settled.claim in short] if short else []

    def samples(self, model: str) -> tuple[tuple[float, float], ...]:
        """Return the samples of a model's load, of instances that do all."""
        for count in self._counts.get(model, ()):
            if count.role == "both":
                return count.monitor.samples
        settled = self._settled.get(model)
        return settled.monitors[0][1].samples if settled is not None and settled.monitors[0][0] == "both" else ()

    def remembered(self) -> CountMemory:
        """Return what the next tick needs. Counts must not be changed after it but by ``ChangeRole``."""
        settled = dict(self._settled)
        monitors: dict[tuple[str, Role], Monitor] = {}
        for name, counts in self._counts.items():
            if all(count.is_settled for count in counts):
                settled[name] = self._settle(name, counts)
            else:
                for count in counts:
                    monitors[name, count.role] = count.monitor
        return CountMemory(monitors, settled, self._catalog, (self._bounds, self._prescale), self._now_s)

    def _is_unchanged(self, name: str, settled: SettledModel) -> bool:
        load = self._state.loads.get(name, NO_LOAD)
        return (
            (load is settled.load or load == settled.load)
            and self._index.marks.get(name) is settled.mark
            and not (settled.kept and self._now_s - load.last_request_s >= self._bounds.keep_alive_s)
        )

    def _settle(self, name: str, counts: list[RoleCount]) -> SettledModel:
        load = self._state.loads.get(name, NO_LOAD)
        kept = any(count.current > max(count.monitor.samples[0][1], count.deployment.min) for count in counts)
        monitors = tuple((count.role, count.monitor) for count in counts)
        claim, wanted = Claim.of(counts[0].deployment), sum(count.wanted for count in counts)
        return SettledModel(load, self._index.marks.get(name), kept, claim, wanted, monitors)

    def _monitor(self, model: str, role: Role) -> Monitor:
        settled = self._last.settled.get(model)
        if settled is None:
            return self._last.monitors.get((model, role), _NEW)
        for known, monitor in settled.monitors:
            if known == role:  # what was counted then held until the last tick
                return replace(monitor, samples=((self._last.at_s, monitor.samples[0][1]),), spare_since_s=None)
        return _NEW

    def _count_roles(self, deployment: Deployment) -> list[RoleCount]:
        load = self._state.loads.get(deployment.name, NO_LOAD)
        known = self._index.instances.get(deployment.name, {})
        staying = [one for one in known.values() if one.state != "draining" and not ends_first(one, deployment)]
        if not deployment.disaggregated:
            return [self._count(deployment, "both", staying, load)]
        prefill = [instance for instance in staying if instance.role != "decode"]
        decode = [instance for instance in staying if instance.role == "decode"]
        first = self._count(deployment, "prefill", prefill, replace(load, running=0, kv_use=0.0))
        most = max(deployment.max, deployment.min)
        first.wanted = max(first.wanted, min(1, most) if load.running else 0)
        if not deployment.may_prefill:
            first.wanted = min(first.wanted, first.current)
        if not deployment.may_prefill and not first.current:
            decoding = load  # they prefill themselves
        elif self._prescale:
            decoding = prescaled(load, first.current, first.wanted)
        else:  # by KV blocks alone: no request counts before it comes to a decode instance
            decoding = replace(load, waiting=0, running=0, tokens_per_s=0.0)
        second = self._count(deployment, "decode", decode, decoding)
        second.wanted = min(max(second.wanted, 1 if first.wanted else 0), most)
        first.wanted = min(first.wanted, MOST_PREFILLING * max(second.wanted, 1))
        return [first, second]

    def _count(self, deployment: Deployment, role: Role, instances: list[Instance], load: Load) -> RoleCount:
        count = RoleCount(deployment, role, instances)
        monitor = self._monitor(deployment.name, role)
        # While instances are replaced, there is one more of them than the load has asked for.
        replacing = bool(count.outdated) and monitor.wanted > 0
        target = scale_target(
            deployment,
            load,
            current=min(count.current, monitor.wanted) if replacing else count.current,
            ready=count.ready,
            ready_since_s=count.ready_since_s,
            now_s=self._now_s,
            monitor=monitor,
            bounds=self._bounds,
        )
        count.wanted, count.least, count.monitor = target.count, target.least, target.monitor
        return count
