"""Credentials of an object store that are found with the first request and renewed while it is read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class RenewedCredentials(Generic[T]):
    """Credentials that the threads of a fetch share.

    ``find`` looks for their source, and returns a function that returns those that are valid now: None where requests
    are anonymous. Both are called by one thread at a time.
    """

    def __init__(self, find: Callable[[], Callable[[], T | None]]) -> None:
        self._find = find
        self._source: Callable[[], T | None] | None = None
        self._lock = threading.Lock()

    def find(self) -> None:
        """Look for the source, unless it has been found. Where that fails, the next call tries again."""
        with self._lock:
            if self._source is None:
                self._source = self._find()

    def current(self) -> T | None:
        assert self._source is not None
        with self._lock:
            return self._source()
