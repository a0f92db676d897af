"""Several iterators as one, read with a timeout, so that a stream can send heartbeats while its source is silent."""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from .faults import as_exception
from .forked_child import ending_forked_children

T = TypeVar("T")

_AHEAD = 64  # items a source may be ahead of a slow reader


class Item(NamedTuple, Generic[T]):
    """One item, and the number of the source that it came from."""

    source: int
    value: T


class Merge(Generic[T]):
    """The items of several sources, each read in a thread of its own. ``get`` raises a source's error."""

    def __init__(self, sources: Sequence[Iterable[T]], ahead: int = _AHEAD) -> None:
        self._sources = sources
        self._items: queue.Queue[tuple[int, Any, BaseException | None, bool]] = queue.Queue(ahead)
        self._open = len(sources)
        self._closed = threading.Event()
        for number, source in enumerate(sources):
            run = contextvars.copy_context().run
            threading.Thread(target=run, args=(self._pump, number, source), name=f"merge-{number}", daemon=True).start()

    @property
    def done(self) -> bool:
        """Whether every source has ended."""
        return self._open == 0

    def get(self, timeout_s: float) -> Item[T] | None:
        """Return the next item, or None after ``timeout_s`` or when a source has ended."""
        try:
            number, value, error, last = self._items.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if error is not None:
            raise as_exception(error)
        if last:
            self._open -= 1
            return None
        return Item(number, value)

    def close(self) -> None:
        """Stop. Each thread closes its source after the item that it waits for, or sooner if it has a ``cancel``."""
        self._closed.set()
        for source in self._sources:
            cancel = getattr(source, "cancel", None)
            if cancel is not None:
                cancel()

    def _pump(self, number: int, source: Iterable[T]) -> None:
        try:
            try:
                with ending_forked_children():
                    for value in source:
                        self._put((number, value, None, False))
                        if self._closed.is_set():
                            return
            finally:
                close = getattr(source, "close", None)
                if close is not None:
                    close()
        except BaseException as error:  # noqa: BLE001 it is raised again where the items are read
            self._put((number, None, error, True))
        else:
            self._put((number, None, None, True))

    def _put(self, item: tuple[int, Any, BaseException | None, bool]) -> None:
        while not self._closed.is_set():
            try:
                self._items.put(item, timeout=0.5)
                return
            except queue.Full:
                continue
