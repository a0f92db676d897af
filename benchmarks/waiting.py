"""Waiting for a cluster to come into a state."""

from __future__ import annotations

import time
from collections.abc import Callable

from medusa_runtime.errors import LabError

_LOOK_S = 0.1


def until(condition: Callable[[], bool], within_s: float, what: str) -> None:
    """Wait for a condition. Raises LabError, with ``what`` was expected, when it does not come to pass in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise LabError(f"expected {what} within {within_s:g} s")
        time.sleep(_LOOK_S)
