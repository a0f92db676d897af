"""Waiting for what other threads and processes do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")

_PATIENCE_S = 240.0  # nothing is proved by it: a machine may be slow
_PAUSE_S = 0.01


def until(condition: Callable[[], Found], say: Callable[[], object] = str, *, within_s: float = _PATIENCE_S) -> Found:
    """Wait until ``condition`` returns something true, and return it. If it never does, fail with what ``say`` returns.

    A slow condition is asked less often, so that it leaves the cores to what is waited for.
    """
    deadline = time.monotonic() + within_s
    while True:
        asked = time.monotonic()
        if found := condition():
            return found
        answered = time.monotonic()
        if answered > deadline:
            raise AssertionError(f"it did not come to pass within {within_s:g} s:\n{say()}")
        time.sleep(max(_PAUSE_S, 2 * (answered - asked)))


async def until_async(condition: Callable[[], Found]) -> Found:
    """Wait like ``until`` for something that the same event loop does."""
    async with asyncio.timeout(_PATIENCE_S):
        while not (found := condition()):
            await asyncio.sleep(_PAUSE_S)
    return found
