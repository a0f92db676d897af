"""A limit for the lines that an engine process of another user's function writes to the node agent's log."""

from __future__ import annotations

import logging
import threading
import time

_MOST, _PER_S = 100.0, 1.0  # lines at once, and a second


class LogLimit(logging.Filter):
    """Leaves out records once there are too many, and says how many it has left out. Add it to a handler."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._free = _MOST
        self._at = time.monotonic()
        self._left_out = 0

    def filter(self, record: logging.LogRecord) -> bool:
        with self._lock:
            now = time.monotonic()
            self._free, self._at = min(self._free + (now - self._at) * _PER_S, _MOST), now
            if self._free < 1:
                self._left_out += 1
                return False
            self._free -= 1
            if self._left_out:
                record.msg, record.args = f"{record.getMessage()} ({self._left_out} lines before it left out)", ()
                self._left_out = 0
        return True


def limit_log() -> None:
    """Limit what this process logs from now on: its client could fill the agent's disk by requests that fail."""
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogLimit())


__all__ = ["limit_log"]
