"""The code that ``--handler`` names: loaded once, called, closed. It knows nothing of HTTP."""

from __future__ import annotations

import inspect
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

from medusa_runtime.errors import HandlerError, HandlerLoadError

from ..contract import Context, Request
from ..deadline import Deadline
from ..forked_child import ending_forked_children
from .binding import Binding
from .loader import load_target
from .loop import AsyncItems, EventLoop


class UserCode:
    """The user's function or class. Its asynchronous code runs in ``loop``; ``folder`` is known from ``load`` on."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._instance: Any = None
        self._call: Callable[..., Any] = _not_loaded
        self._binding: Binding | None = None
        self.folder: Path | None = None

    @property
    def is_event_style(self) -> bool:
        """Whether the function is an OpenFaaS ``handle(event, context)``, whose result has a statusCode."""
        return self._binding is not None and self._binding.is_event_style

    def load(self, spec: str, context: Context) -> None:
        """Import the code that ``spec`` names, and run its ``load``.

        Raises HandlerError and HandlerLoadError, with the code's own error as cause.
        """
        with ending_forked_children():
            self._load(spec, context)

    def _load(self, spec: str, context: Context) -> None:
        target = load_target(spec)
        source = getattr(sys.modules.get(getattr(target, "__module__", "")), "__file__", None)
        self.folder = Path(source).parent if source else None
        try:
            self._instance = target() if inspect.isclass(target) else target
            self._call = self._entry(target)
            self._binding = Binding(self._call, context)
            load = getattr(self._instance, "load", None)
            if callable(load):
                self._wait(load(context) if inspect.signature(load).parameters else load())
        except HandlerLoadError:
            raise
        except (Exception, SystemExit) as error:
            what = f"{spec}: loading raised {type(error).__name__}: {error}"
            if isinstance(error, AttributeError) and error.name and error.obj is None and context.weights is None:
                what += "; without --model, context.weights and context.model are None"
            raise HandlerError(what) from error

    def _entry(self, target: Any) -> Callable[..., Any]:
        predict = getattr(self._instance, "predict", None)
        if callable(predict):
            return predict  # type: ignore[no-any-return]
        if inspect.isclass(target) and "__call__" not in vars(target):
            methods = ", ".join(name for name in vars(target) if not name.startswith("_")) or "nothing"
            raise HandlerLoadError(f"class {target.__name__} has no method predict(request); it has {methods}")
        return self._instance  # type: ignore[no-any-return]

    def call(self, request: Request, is_disconnected: Callable[[], bool] = lambda: False) -> Any:
        """Call the function and return its result; an asynchronous iterator becomes a plain one. Call after ``load``.

        Raises the function's errors, ClientDisconnectedError, and 504 when the request's time is over.
        """
        assert self._binding is not None
        positional, named = self._binding.arguments(request)
        call = partial(_run, self._call, *positional, **named)
        result = self._wait(
            is_disconnected.run(call) if isinstance(is_disconnected, Deadline) else call(), is_disconnected
        )
        return AsyncItems(self._loop, result) if isinstance(result, AsyncIterator) else result

    def _wait(self, result: Any, is_disconnected: Callable[[], bool] = lambda: False) -> Any:
        return self._loop.run(result, is_disconnected) if inspect.iscoroutine(result) else result

    def close(self) -> None:
        """Run the ``close`` of the user's class, if it has one. Raises its errors."""
        close = getattr(self._instance, "close", None)
        if callable(close):
            with ending_forked_children():
                self._wait(close())


def _run(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with ending_forked_children():
        return function(*arguments, **named)


def _not_loaded(*_: object) -> Any:
    raise AssertionError("called before it was loaded")
