"""Turns: which models have an instance while there are more models than places."""

from __future__ import annotations

from .counting import RoleCount
from .scaling import Turn
from .state import Load

TURN_S = 30.0
_STARTS = 4.0  # a turn is at least so many times as long as the model's starts
_LEAST_IDLE_S = 1.0


def turn(count: RoleCount, load: Load, now_s: float, turn_s: float | None = TURN_S) -> Turn:
    """Rank a model among those that cannot all have an instance. The lowest ones get one.

    A model that serves keeps its place for ``turn_s`` times its weight. Then it loses it to one whose requests have
    waited for ``turn_s``, so that all get a turn, and few of them begin with a start. One that has had no request for
    as long as its next start would take comes after those that have some: what it costs to keep its place is then at
    most twice what the best choice would have cost (the ski rental problem). All are equal if ``turn_s`` is None.
    """
    if turn_s is None:
        return Turn()
    if not count.current:
        late = load.longest_wait_s >= turn_s
        return Turn(1 if late else 3, -load.longest_wait_s, starts=True, is_late=late)
    deployment = count.deployment
    start_s = max((measured.times.ttft_s for measured in deployment.measured.values()), default=0.0)
    idle_s = 0.0 if load.waiting or load.running else now_s - load.last_request_s
    if idle_s >= max(min(start_s, turn_s), _LEAST_IDLE_S):
        return Turn(4)
    ready = (instance.since_s for instance in count.instances if instance.state == "ready" and instance.full)
    served_s = now_s - min(ready, default=now_s)
    left_s = max(turn_s, _STARTS * start_s) * deployment.weight - served_s
    return Turn(0 if left_s > 0 else 2, served_s, left_s=max(left_s, 0.0))


__all__ = ["TURN_S", "turn"]
