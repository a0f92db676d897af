"""The accelerators that an instance is given, the smallest with room for it, and the models that need larger ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from .sizing import DEVICE_OVERHEAD_BYTES
from .state import Deployment, FreeDevice, Node


def needed_bytes(deployment: Deployment, workers: int = 1) -> int:
    """Return the memory that an instance, or a worker with one part of several, needs on each of its accelerators.

    Keys and values are counted whole for each worker. 0 if the size of the model is not known.
    """
    if not deployment.size_bytes:
        return 0
    shared = -(-deployment.size_bytes // workers) + deployment.kv_bytes
    return -(-shared // deployment.devices) + DEVICE_OVERHEAD_BYTES


def given(free: Sequence[FreeDevice], count: int, needed: int) -> list[int]:
    """Return the positions of ``count`` accelerators: the smallest with so many bytes free, or else the roomiest.

    Of equally large ones, and if nothing is known of what the instance needs (0), it gets the roomiest. All of them if
    there are too few.
    """
    roomiest = sorted(range(len(free)), key=lambda position: (-free[position].free_bytes, position))
    enough = [position for position in roomiest if free[position].free_bytes >= needed]
    if not needed or len(enough) < count:
        return roomiest[:count]
    return sorted(enough, key=lambda position: free[position].size_bytes)[:count]


def left_over(free: Sequence[FreeDevice], count: int, needed: int) -> tuple[FreeDevice, ...]:
    """Return the accelerators that are left once an instance has got its own."""
    taken = given(free, count, needed)
    return tuple(one for position, one in enumerate(free) if position not in taken)


class Rival(NamedTuple):
    """The accelerators that some models need: how many of one node, with how many bytes each, of which kind of node."""

    devices: int
    least_bytes: int
    kind: str

    def places(self, node: Node, free: Sequence[FreeDevice]) -> int:
        """Return how many instances have room on these accelerators of a node."""
        if self.kind not in ("", node.device_kind):
            return 0
        if not node.device_bytes:
            return len(free) // self.devices
        return sum(one.free_bytes >= self.least_bytes for one in free) // self.devices


class Needs:
    """The needs of all models, counted once. Those that the same accelerators meet count as one.

    ``sizes`` are those of the cluster's accelerators.
    """

    def __init__(self, deployments: Mapping[str, Deployment], sizes: Collection[int]) -> None:
        self._sizes = sorted(set(sizes))
        self._least: dict[tuple[int, int, str], int] = {}  # accelerators, place of their size, kind → bytes
        for other in deployments.values():
            if other.device != "cpu":
                needed = needed_bytes(other)
                key = other.devices, bisect_left(self._sizes, needed), other.device_kind
                self._least[key] = min(self._least.get(key, needed), needed)

    def rivals(self, deployment: Deployment) -> list[Rival]:
        """Return what the models need that need more than a deployment does."""
        own = bisect_left(self._sizes, needed_bytes(deployment))
        return [
            Rival(devices, needed, kind)
            for (devices, size, kind), needed in sorted(self._least.items())
            if not kind or deployment.device_kind in ("", kind)
            if own < size < len(self._sizes) or devices > deployment.devices
        ]


__all__ = ["Needs", "Rival", "given", "left_over", "needed_bytes"]
