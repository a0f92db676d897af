"""An emulated network link of a given speed, which the channels of a worker share."""

from __future__ import annotations

import threading
import time

_BURST_BYTES = 64 << 10


class EmulatedLink:
    """A token bucket. ``take`` returns once so many bytes may be on the wire."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._burst_s = _BURST_BYTES / bytes_per_s
        self._free_at = 0.0  # when the wire will have sent everything it was given
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at = max(self._free_at, now - self._burst_s) + size_bytes / self.bytes_per_s
            wait_s = self._free_at - now
        if wait_s > 0:
            time.sleep(wait_s)


__all__ = ["EmulatedLink"]
