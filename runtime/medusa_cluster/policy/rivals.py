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


def rivals(deployment: Deployment, deployments: Mapping[str, Deployment], sizes: Collection[int]) -> list[Rival]:
    """Return what the models need that need more than a deployment does.

    ``sizes`` are those of the cluster's accelerators. Needs that the same accelerators meet count as one.
    """
    ordered = sorted(set(sizes))
    own = bisect_left(ordered, needed_bytes(deployment))
    found: dict[tuple[int, int, str], int] = {}
    for other in deployments.values():
        needed, kind = needed_bytes(other), other.device_kind
        size = bisect_left(ordered, needed)
        if other.device == "cpu" or (kind and deployment.device_kind not in ("", kind)):
            continue
        if (size > own and size < len(ordered)) or other.devices > deployment.devices:
            key = (other.devices, size, kind)
            found[key] = min(found.get(key, needed), needed)
    return [Rival(devices, needed, kind) for (devices, _, kind), needed in sorted(found.items())]


__all__ = ["Rival", "rivals"]
