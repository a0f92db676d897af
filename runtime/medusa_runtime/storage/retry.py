"""Retries, and a time limit, for an object store or a file system that does not answer as it should."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from ..errors import StorageError, UnreachableError

logger = logging.getLogger(__name__)

T = TypeVar("T")
_LOG_EVERY_S = 10.0
_IDLE_S = 1.0
_MOST_DOUBLINGS = 100  # 2.0 to the power of a large count would overflow


def doubling_pause_s(failures: int, first_s: float, longest_s: float) -> float:
    """Return how long to wait after ``failures`` in a row: ``first_s``, then twice as long each time, up to a limit."""
    return min(first_s * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), longest_s) if failures else 0.0


@dataclass(frozen=True)
class RetryPolicy:
    """How often, and for how long, to try again.

    ``patience_s`` is counted from the last progress, so a long transfer may fail often, while a dead one is soon given
    up. Bytes count as progress only if they arrive at ``least_bytes_per_s`` or faster, so a server that trickles bytes
    cannot hold up a fetch. ``stall_s`` is how long a connection may be silent, and ``unreachable_attempts`` the number
    of attempts to make one.
    """

    attempts: int = 8
    patience_s: float = 20.0
    unreachable_attempts: int = 3
    stall_s: float = 10.0
    first_pause_s: float = 0.1
    longest_pause_s: float = 4.0
    least_bytes_per_s: float = 1024.0


class TransientError(Exception):
    """A failure that is worth another try.

    ``error`` is what the user sees if no further try succeeds. ``retry_after_s`` is how long the server asks to wait.
    """

    def __init__(self, error: StorageError, retry_after_s: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.retry_after_s = retry_after_s


class NoAnswerError(Exception):
    """A call has not returned within its time limit, which the message names."""


class CallThreads:
    """Threads for calls that may hang. A thread stays behind in such a call, so there are ``most`` of them at most.

    A thread takes one call after another, and ends when none has come for a second.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._room = threading.Semaphore(self._most)
        self._idle: deque[SimpleQueue[Callable[[], Callable[[], None]]]] = deque()  # where an idle thread takes a call

    def call_within(self, timeout_s: float, operation: Callable[[], T]) -> T:
        """Return what an operation returns. Raises NoAnswerError if that takes longer than ``timeout_s``.

        Raises RuntimeError if there is no room for a thread.
        """
        from concurrent.futures import Future  # 5 ms, and few stores need it

        if self._pid != os.getpid():  # a fork has no threads of its parent's
            self._begin()
        found, deadline = Future[T](), time.monotonic() + timeout_s

        def run() -> Callable[[], None]:
            try:
                result = operation()
            except BaseException as error:  # noqa: BLE001  raised again in the thread that waits
                return partial(found.set_exception, error)
            return partial(found.set_result, result)

        if not self._room.acquire(timeout=timeout_s):  # earlier calls hang
            raise NoAnswerError(f"no answer within {timeout_s:g} s")
        try:
            calls = self._idle.pop()
        except IndexError:
            calls = SimpleQueue()
            try:
                threading.Thread(target=self._work, args=(calls,), name="call-within", daemon=True).start()
            except RuntimeError:
                self._room.release()
                raise
        calls.put(run)
        try:
            return found.result(max(deadline - time.monotonic(), 0.0))
        except TimeoutError:
            if found.done():
                raise
            raise NoAnswerError(f"no answer within {timeout_s:g} s") from None

    def _work(self, calls: SimpleQueue[Callable[[], Callable[[], None]]]) -> None:
        while True:
            try:
                run = calls.get(timeout=_IDLE_S)
            except Empty:
                try:
                    self._idle.remove(calls)
                except ValueError:  # a call comes at this moment
                    continue
                return
            answer = run()
            self._idle.append(calls)  # before the answer, so that the next call finds this thread
            self._room.release()
            answer()
            del run, answer  # what they hold would stay for as long as this thread is idle


_THREADS = CallThreads(256)


def call_within(timeout_s: float, operation: Callable[[], T]) -> T:
    """Call an operation in one of this process's threads for that; see ``CallThreads``."""
    return _THREADS.call_within(timeout_s, operation)


class RetryLog:
    """Counts the requests of this process that are tried again, and logs some of them: one in ten seconds.

    ``on_retry`` is called for each of them, by one thread at a time.
    """

    def __init__(self) -> None:
        self.on_retry: Callable[[], None] | None = None
        self._count = 0
        self._logged_at = float("-inf")
        self._lock = threading.Lock()

    def add(self, error: StorageError) -> None:
        with self._lock:
            self._count += 1
            if (report := self.on_retry) is not None:
                report()
            if time.monotonic() < self._logged_at + _LOG_EVERY_S:
                return
            self._logged_at = time.monotonic()
            before = "" if self._count == 1 else f" (retry {self._count} of this fetch)"
            logger.warning("%s; trying again%s", error, before)


RETRIES = RetryLog()


def with_retries(policy: RetryPolicy, attempt: Callable[[], T]) -> T:
    """Call ``attempt`` until it raises no TransientError, and return its result.

    Raises the error of the last try when the policy allows no further one.
    """
    state = RetryState(policy)
    while True:
        try:
            return attempt()
        except TransientError as cause:
            state.back_off(cause)


class RetryState:
    """The tries of one operation. Call ``back_off`` after each failure."""

    def __init__(self, policy: RetryPolicy, sleep: Callable[[float], None] = time.sleep) -> None:
        self._policy = policy
        self._sleep = sleep
        self._reset()

    def _reset(self) -> None:
        self._failed = 0
        self._bytes = 0
        self._since = time.monotonic()

    def progressed(self, count: int) -> None:
        """Count bytes that have arrived. If they come fast enough, the count of failures and the time start again."""
        self._bytes += count
        if self._bytes >= self._policy.least_bytes_per_s * (time.monotonic() - self._since):
            self._reset()

    @property
    def is_too_slow(self) -> bool:
        """Whether bytes have arrived too slowly for too long."""
        return time.monotonic() > self._since + self._policy.patience_s

    def exclude_pause(self, seconds: float) -> None:
        """Do not count this time, in which the reader itself held up the transfer."""
        self._since += seconds

    def back_off(self, cause: TransientError) -> None:
        """Sleep before the next try, or raise ``cause.error`` if there is to be none.

        The pause doubles with each failure. A random part of it is left out, so that many readers do not come back at
        once.
        """
        import random  # 10 ms, and most fetches never fail

        self._failed += 1
        unreachable = isinstance(cause.error, UnreachableError)
        most = self._policy.unreachable_attempts if unreachable else self._policy.attempts
        longest = doubling_pause_s(self._failed, self._policy.first_pause_s, self._policy.longest_pause_s)
        pause = longest * (0.5 + random.random() / 2)
        if cause.retry_after_s is not None:
            pause = max(pause, cause.retry_after_s)
        if self._failed >= most or time.monotonic() + pause > self._since + self._policy.patience_s:
            tries = "once" if self._failed == 1 else f"{self._failed} times"
            asked = "" if cause.retry_after_s is None else f"; the server asks to wait {cause.retry_after_s:,.0f} s"
            raise type(cause.error)(f"{cause.error} (tried {tries}{asked})") from None
        RETRIES.add(cause.error)
        self._sleep(pause)
