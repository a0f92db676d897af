"""``@batch``, which gives the user's function requests that come at the same time as one list."""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, get_args, get_origin

from .caller import common_caller, current_caller
from .contract import HttpError
from .disconnection import current_disconnect_check

if TYPE_CHECKING:
    import asyncio

_MAX_SIZE = 4096


def batch(*, max_size: int = 8, max_wait_ms: float = 5.0) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Have ``predict(self, requests)`` take a list, and return a list with a result for each, in order.

    A batch runs when ``max_size`` requests wait or the first has waited ``max_wait_ms``. While one runs, the next is
    gathered. Each request's body must fit the annotated type of the list's items (``requests: list[Body]``). An
    exception among the results is raised for the caller of that request; one that the function raises, for all callers.
    """
    if isinstance(max_size, bool) or not isinstance(max_size, int) or not 1 <= max_size <= _MAX_SIZE:
        raise ValueError(f"@batch: expected max_size as a whole number from 1 to {_MAX_SIZE}, found {max_size!r}")
    if isinstance(max_wait_ms, bool) or not isinstance(max_wait_ms, int | float) or not 0 <= max_wait_ms <= 60_000:
        raise ValueError(f"@batch: expected max_wait_ms as a number from 0 to 60000, found {max_wait_ms!r}")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature, name = _item_signature(function)
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(f"@batch: {function.__qualname__} yields; expected one that returns a list")
        waiting = _AsyncBatcher(max_size, max_wait_ms / 1e3) if inspect.iscoroutinefunction(function) else None
        threads = _ThreadBatcher(max_size, max_wait_ms / 1e3)

        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            item = named.pop(name) if name in named else arguments[-1]
            owner = arguments[: len(signature.parameters) - 1]
            run = functools.partial(function, *owner)
            return threads.call(run, item) if waiting is None else waiting.call(run, item)

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate


def _item_signature(function: Callable[..., Any]) -> tuple[inspect.Signature, str]:
    """Return the signature of a call with one item, and the name of the item's parameter."""
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError:
        signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if not 1 <= len(parameters) <= 2 or (len(parameters) == 2 and parameters[0].name != "self"):
        raise TypeError(f"@batch: expected one parameter, a list of requests, found {function.__qualname__}{signature}")
    last = parameters[-1]
    kinds = get_args(last.annotation) if get_origin(last.annotation) is list else ()
    last = last.replace(annotation=kinds[0] if kinds else inspect.Parameter.empty)
    return signature.replace(parameters=[*parameters[:-1], last], return_annotation=Any), last.name


class _PendingItem:
    """A request that waits for its place in a batch, or for its result."""

    def __init__(self, item: Any) -> None:
        self.item = item
        self._is_disconnected = current_disconnect_check.get(lambda: False)
        self.caller = current_caller.get()
        self.arrived_at = time.monotonic()
        self.done = False
        self.result: Any = None

    def is_given_up(self) -> bool:
        """Return whether nobody waits for the result: the client has left, or the request's time is over."""
        try:
            return self._is_disconnected()
        except HttpError:  # 504, which its own thread answers; the batch goes on for the others
            return True


def _as_list(results: Any, count: int) -> list[Any]:
    """Return the results as a list of ``count``. Raises TypeError, ValueError, and a generator's own errors."""
    if isinstance(results, str | bytes | Mapping | Set) or not isinstance(results, Iterable):
        raise TypeError(f"@batch: expected a list of results, found {type(results).__name__}")
    listed = list(results)
    if len(listed) != count:
        raise ValueError(f"@batch: expected {count} results, one for each request, found {len(listed)}")
    return listed


def _distribute(entries: Sequence[_PendingItem], results: list[Any] | BaseException) -> None:
    """Give each entry its result, or all of them the exception."""
    for number, entry in enumerate(entries):
        entry.result = results[number] if isinstance(results, list) else results
        entry.done = True


def _result_of(result: Any) -> Any:
    if isinstance(result, BaseException):
        raise result
    return result


class _ThreadBatcher:
    """Batches of a plain function. The first of the waiting threads runs it for all."""

    def __init__(self, max_size: int, max_wait_s: float) -> None:
        self._max_size = max_size
        self._max_wait_s = max_wait_s
        self._changed = threading.Condition()
        self._waiting: list[_PendingItem] = []
        self._running = False

    def call(self, run: Callable[[list[Any]], Any], item: Any) -> Any:
        own = _PendingItem(item)
        with self._changed:
            self._waiting.append(own)
            self._changed.notify_all()
            while not own.done and not self._may_run(own):
                self._changed.wait(self._left_s(own))
            if own.done:
                return _result_of(own.result)
            entries = self._waiting[: self._max_size]
            del self._waiting[: self._max_size]
            self._running = True
        token = current_disconnect_check.set(lambda: all(entry.is_given_up() for entry in entries))
        caller = current_caller.set(common_caller(entry.caller for entry in entries))
        results: list[Any] | BaseException = []
        try:
            results = _as_list(run([entry.item for entry in entries]), len(entries))
        except BaseException as error:
            results = error
            if not isinstance(error, Exception):
                raise
        finally:
            current_disconnect_check.reset(token)
            current_caller.reset(caller)
            with self._changed:
                _distribute(entries, results)
                self._running = False
                self._changed.notify_all()
        return _result_of(own.result)

    def _may_run(self, own: _PendingItem) -> bool:
        if self._running or not self._waiting or self._waiting[0] is not own:
            return False
        return len(self._waiting) >= self._max_size or time.monotonic() - own.arrived_at >= self._max_wait_s

    def _left_s(self, own: _PendingItem) -> float | None:
        """Return how many seconds to wait at most; None if another thread will notify."""
        if self._running or self._waiting[0] is not own:
            return None
        return max(0.0, own.arrived_at + self._max_wait_s - time.monotonic())


class _AsyncBatcher:
    """Batches of an asynchronous function, all in the one event loop of user code."""

    def __init__(self, max_size: int, max_wait_s: float) -> None:
        self._max_size = max_size
        self._max_wait_s = max_wait_s
        self._waiting: list[tuple[_PendingItem, asyncio.Future[None]]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    async def call(self, run: Callable[[list[Any]], Awaitable[Any]], item: Any) -> Any:
        import asyncio

        loop = asyncio.get_running_loop()
        entry, done = _PendingItem(item), loop.create_future()
        self._waiting.append((entry, done))
        self._schedule(run)
        try:
            await done
        except asyncio.CancelledError:  # its client has left
            self._waiting = [each for each in self._waiting if each[0] is not entry]
            raise
        return _result_of(entry.result)

    def _schedule(self, run: Callable[[list[Any]], Awaitable[Any]]) -> None:
        """Begin a batch, or set a timer for it."""
        import asyncio

        if self._task is not None or not self._waiting:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        left_s = self._waiting[0][0].arrived_at + self._max_wait_s - time.monotonic()
        if len(self._waiting) >= self._max_size or left_s <= 0:
            self._task = asyncio.get_running_loop().create_task(self._run(run))
        else:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._schedule, run)

    async def _run(self, run: Callable[[list[Any]], Awaitable[Any]]) -> None:
        taken, self._waiting = self._waiting[: self._max_size], self._waiting[self._max_size :]
        entries = [entry for entry, _ in taken]
        if not entries:  # their clients left after this batch was begun
            self._task = None
            return
        token = current_disconnect_check.set(lambda: all(entry.is_given_up() for entry in entries))
        caller = current_caller.set(common_caller(entry.caller for entry in entries))
        results: list[Any] | BaseException = []
        try:
            results = _as_list(await run([entry.item for entry in entries]), len(entries))
        except BaseException as error:
            results = error
            if not isinstance(error, Exception):
                raise
        finally:
            current_disconnect_check.reset(token)
            current_caller.reset(caller)
            _distribute(entries, results)
            for _, done in taken:
                if not done.done():
                    done.set_result(None)
            self._task = None
            self._schedule(run)
