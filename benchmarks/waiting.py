"""A wait for a state of a cluster."""

from __future__ import annotations

import time
from collections.abc import Callable

from medusa_runtime.errors import LabError

_POLL_S = 0.1


def until(condition: Callable[[], bool], within_s: float, what: str) -> None:
    """Wait until a condition is true. Raises LabError, which names ``what`` was expected, if that takes too long."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise LabError(f"expected {what} within {within_s:g} s")
        time.sleep(_POLL_S)
