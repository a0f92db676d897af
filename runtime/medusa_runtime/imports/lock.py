"""A lock for code that imports modules. It may be taken inside and outside of Python's own import locks."""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  it registers fork hooks, which must not happen while a fork waits here
import importlib._bootstrap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# The versions with which this lock, and so the lean imports, were tested.
TESTED_PYTHONS = ((3, 11), (3, 12), (3, 13), (3, 14), (3, 15))
_PASSING_CHECK_S = 0.05  # how often a thread that waits checks whether the holder waits for it
_bootstrap: Any = importlib._bootstrap


class ImportLock:
    """A re-entrant lock that is also granted to a thread for whose import the lock's holder waits.

    A thread that imports a module may need this lock while its holder waits for that very module. Without this rule,
    neither could go on. The holder stands still until the import is over, so the two never run at the same time. A fork
    waits for the lock, so that no child inherits it from a thread that the child does not have.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._holder: int | None = None
        self._depth = 0
        self._local = threading.local()
        os.register_at_fork(before=self._take, after_in_parent=self._give, after_in_child=self._give)

    @contextmanager
    def held(self) -> Iterator[None]:
        self._take()
        try:
            yield
        finally:
            self._give()

    def _take(self) -> None:
        me = threading.get_ident()
        passed: int = getattr(self._local, "passed", 0)
        if passed:
            self._local.passed = passed + 1
            return
        while not self._lock.acquire(timeout=_PASSING_CHECK_S):
            if self._is_waited_for(me):
                self._local.passed = 1
                return
        self._holder = me
        self._depth += 1

    def _give(self) -> None:
        if passed := getattr(self._local, "passed", 0):
            self._local.passed = passed - 1
            return
        self._depth -= 1
        if not self._depth:
            self._holder = None
        self._lock.release()

    def _is_waited_for(self, me: int) -> bool:
        """Return whether the holder waits, directly or through other threads, for a module that this thread imports."""
        seen: set[int | None] = {None}
        threads = [self._holder]
        while threads:
            thread = threads.pop()
            if thread == me:
                return True
            if thread not in seen:
                seen.add(thread)
                # A private table of Python: by thread, a lock or, since Python 3.12, a list of locks.
                waited = _bootstrap._blocking_on.get(thread)
                threads += [
                    lock.owner for lock in (waited if isinstance(waited, list) else [waited]) if lock is not None
                ]
        return False
