"""Fair shares of a full cluster: the models have as many instances as there are slots for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .claims import Claim, Shortage, bounds
from .counting import RoleCount
from .index import Index
from .scaling import shares
from .state import Deployment


def share(counts: list[RoleCount], index: Index, may_start: Callable[[Deployment], bool]) -> list[Shortage]:
    """Cut the counts down to what the cluster has. Returns what there is too little of, on nodes of all kinds.

    A model without an instance that cannot start anywhere, as ``may_start`` says, takes no share from others.
    """
    claims = {Claim.of(count.deployment) for count in counts}
    exceeded, shortages = [], []
    for bound in bounds(index.shapes, claims):
        sharing = [(count, bound.slots_of.get(Claim.of(count.deployment), 0)) for count in counts]
        useful = sum(count.wanted * slots for count, slots in sharing) - bound.capacity
        if useful <= 0:
            continue
        exceeded.append((bound.capacity, [(count, slots) for count, slots in sharing if slots]))
        if bound.of_all_kinds:
            least = sum(max(count.least, count.deployment.min) * slots for count, slots in sharing)
            shortages.append(Shortage(bound, useful, max(least - bound.capacity, 0)))
    for capacity, cut in exceeded:
        able = ((count, slots) for count, slots in cut if count.current or may_start(count.deployment))
        _divide({f"{count.deployment.name} {count.role}": (count, slots) for count, slots in able}, capacity)
    return shortages


def _divide(counts: Mapping[str, tuple[RoleCount, int]], capacity: int) -> None:
    """Cut the counts down so that the capacity is enough, fairly. None loses more than one instance at a time.

    Each comes with the slots that an instance takes.
    """
    demands = {name: count.wanted for name, (count, _) in counts.items()}
    models = {name: count.deployment for name, (count, _) in counts.items()}
    slots_of = {name: slots for name, (_, slots) in counts.items()}
    for name, number in shares(demands, models, capacity, slots_of).items():
        count, _ = counts[name]
        count.wanted = max(number, min(count.wanted, count.current - 1))


__all__ = ["share"]
