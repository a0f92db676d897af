"""One tick of the cluster: from its state to decisions."""

from __future__ import annotations

from dataclasses import dataclass

from .state import ClusterState, Decision


@dataclass(frozen=True)
class Memory:
    """What one call of ``decide`` leaves for the next. A controller that starts again begins with an empty one."""


def decide(state: ClusterState, now_s: float, memory: Memory) -> tuple[list[Decision], Memory]:
    """Return what to do now, in the order in which to do it, and the memory for the next call.

    Deterministic. ``now_s`` is on the clock of the state's times. The controller may drop a memory and begin anew.
    """
    return [], memory
