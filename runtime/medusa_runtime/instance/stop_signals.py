"""The signals that end an instance: the first one drains it, and a second one ends it at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import FrameType

# A signal that comes sooner after the first one is the same: timeout(1) and npm send it to us and to our process group.
_AGAIN_S = 0.5
_NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignals:
    """Handles SIGTERM, SIGINT and SIGHUP. Each signal, including SIGCHLD, makes ``wakeup_fd`` readable."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._requested_at: float | None = None
        self.immediate = False  # whether to stop without draining
        self.wakeup_fd, self._write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def install(self) -> None:
        signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in _NUMBERS:
            if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:  # nohup ignores SIGHUP
                signal.signal(number, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    @property
    def stop_requested(self) -> bool:
        """Whether the instance has been asked to stop."""
        return self._requested_at is not None

    def seconds_since_request(self) -> float:
        """Return the seconds since the first signal; 0 before it."""
        return 0.0 if self._requested_at is None else time.monotonic() - self._requested_at

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._requested_at is None:
            self._requested_at = time.monotonic()
            self._on_first()
        elif self.seconds_since_request() > _AGAIN_S:
            self.immediate = True

    def drain(self) -> None:
        """Empty the pipe behind ``wakeup_fd``."""
        try:
            os.read(self.wakeup_fd, 4096)
        except BlockingIOError:
            pass

    def ignore(self) -> None:
        """Ignore further signals, because the instance is ending."""
        for number in _NUMBERS:
            signal.signal(number, signal.SIG_IGN)

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        os.close(self.wakeup_fd)
        os.close(self._write_fd)
