"""The accelerators of a node that an instance is given: the smallest that have room for it."""

from __future__ import annotations

from collections.abc import Sequence

from .sizing import DEVICE_OVERHEAD_BYTES
from .state import Deployment, FreeDevice


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


__all__ = ["given", "left_over", "needed_bytes"]
