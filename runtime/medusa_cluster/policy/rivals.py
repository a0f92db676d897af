"""The models that need larger accelerators, or more of one node, than a model that is about to start."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from .accelerators import needed_bytes
from .state import Deployment, FreeDevice, Node


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


__all__ = ["Needs", "Rival"]
