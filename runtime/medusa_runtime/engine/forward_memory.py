"""Offline: the memory that a forward takes beside weights and cache, measured in the process that runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ..config import Settings
from ..state.kv_plan import logits_bytes

logger = logging.getLogger(__name__)

# The memory grows with the number of tokens, so for more tokens than these it is extrapolated. Measuring would take
# minutes instead of seconds.
MOST_TOKENS = 256
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measure_forward(
    forward: Callable[[], object], settings: Settings, *, tokens: int, vocabulary: int, retained_bytes: int = 0
) -> int | None:
    """Return the peak memory in bytes of a forward of ``max_batched_tokens``; None if this kernel does not report it.

    ``forward`` runs ``tokens`` tokens, and the result is scaled up. Call it once before this, so that threads and
    buffers which stay exist already. ``retained_bytes`` are subtracted: pages of the cache that the forward touches
    first.
    """
    try:
        _CLEAR_REFS.write_text("5")  # the high-water mark is what is resident now; proc(5)
        before = _status("VmRSS")
        forward()
        peak = _status("VmHWM")
    except OSError as error:
        logger.warning("the memory of a forward cannot be measured (%s); it is calculated", error.strerror)
        return None
    steps = -(-settings.max_batched_tokens // tokens)
    return max(peak - before - retained_bytes, 0) * steps + logits_bytes(settings, vocabulary)


def _status(name: str) -> int:
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


__all__ = ["MOST_TOKENS", "measure_forward"]
