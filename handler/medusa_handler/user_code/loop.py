"""Asynchronous user code: one event loop in a thread of its own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from ..disconnection import POLL_S
from ..faults import ClientDisconnectedError
from ..forked_child import ending_forked_children

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


class EventLoop:
    """An event loop that starts with the first coroutine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        import asyncio  # 40 ms that no probe, and few functions, should wait for

        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name="user-loop", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T], is_disconnected: Callable[[], bool] = lambda: False) -> T:
        """Return the coroutine's result. If the client leaves, cancel it and raise ClientDisconnectedError."""
        future = self.submit(_ending_children(coroutine))
        while True:
            done, _ = concurrent.futures.wait([future], POLL_S)
            if done:
                return future.result()
            left = True
            try:
                left = is_disconnected()
            finally:
                if left:
                    future.cancel()
            if left:
                raise ClientDisconnectedError


async def _ending_children(coroutine: Coroutine[Any, Any, T]) -> T:
    with ending_forked_children():
        return await coroutine


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run the loop forever: without this, ``sys.exit`` in a coroutine would end the loop, too."""
    while True:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):
            loop.run_forever()


class AsyncItems:
    """An asynchronous iterator as a plain one; ``cancel`` may be called from another thread."""

    def __init__(self, loop: EventLoop, items: AsyncIterator[Any]) -> None:
        self._loop = loop
        self._items = items
        self._cancelled = False
        self._step: concurrent.futures.Future[Any] | None = None

    def __iter__(self) -> AsyncItems:
        return self

    def __next__(self) -> Any:
        async def step() -> Any:
            with ending_forked_children():
                return await anext(self._items)

        if self._cancelled:
            raise StopIteration
        self._step = self._loop.submit(step())
        if self._cancelled:  # it was cancelled between the two lines above
            self._step.cancel()
        try:
            return self._step.result()
        except (StopAsyncIteration, concurrent.futures.CancelledError):
            raise StopIteration from None

    def cancel(self) -> None:
        self._cancelled = True
        if self._step is not None:
            self._step.cancel()

    def close(self) -> None:
        close = getattr(self._items, "aclose", None)
        if close is None:
            return

        async def finish() -> None:
            await close()

        self._loop.submit(finish()).result()
