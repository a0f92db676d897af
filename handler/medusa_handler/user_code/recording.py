"""Records, offline and with a request, in which order a function uses its modules' weights (Cicada §3.3)."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from medusa_runtime.errors import HandlerError, MedusaError
from medusa_runtime.timeline import Timeline

from ..contract import Context, Headers, HttpError, Request, Response
from .code import UserCode
from .loop import EventLoop
from .user_traceback import log_cause
from .weights import Weights

if TYPE_CHECKING:
    from medusa_runtime.config import Settings
    from medusa_runtime.region.reader import Region

T = TypeVar("T")


class _CallingThreadLoop(EventLoop):
    """A loop that runs asynchronous code in the calling thread, because torch's work is recorded in one thread."""

    def __init__(self, runner: asyncio.Runner) -> None:
        super().__init__()
        self._runner = runner

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(self._runner.run(coroutine))
        except Exception as error:  # noqa: BLE001  raised where the result is read
            future.set_exception(error)
        return future


def execution_order(region: Region, settings: Settings, body: bytes) -> list[str]:
    """Return the checkpoint's tensors in the order in which a function uses them to answer a request.

    The function is that of ``settings.handler``, the request ``POST /`` with ``body``. Tensors that it does not use
    come last. ``region`` holds the whole checkpoint. The request is made twice, since the first may build modules.
    Raises HandlerLoadError, and HandlerError if the function fails, refuses the request, or uses none of the weights.
    """
    assert settings.handler is not None
    from medusa_runtime.load.trace import ExecutionTrace

    weights = Weights(region, settings, Timeline.create("materialize"))
    with asyncio.Runner() as runner:
        code = UserCode(_CallingThreadLoop(runner))
        try:
            code.load(settings.handler, Context(None, settings, weights))
            _answer(code, body)
            trace = ExecutionTrace(weights.names())
            with trace:
                _answer(code, body)
            code.close()
        except MedusaError as error:
            log_cause(error, code.folder)
            raise
        finally:
            weights.close()
    if not trace.order:
        raise HandlerError(
            f"{settings.handler}: answering used none of the weights, or in threads of its own; expected a request "
            "that runs a module of context.weights.build in the thread that is asked"
        )
    return trace.ahead_of(region.wait_index().order)


def _answer(code: UserCode, body: bytes) -> None:
    """Make one request and read its result to the end."""
    headers = Headers({"content-type": "application/json"}.items())
    try:
        result = code.call(Request("POST", "/", headers, {}, body, "materialize"))
        found = result.body if isinstance(result, Response) else result
        if isinstance(found, Iterator):
            for _ in found:
                pass
    except HttpError as error:
        raise HandlerError(f"the function refused the request with {error.status}: {error.message}") from None
    except MedusaError:
        raise
    except Exception as error:
        raise HandlerError(f"the function failed at the request: {type(error).__name__}: {error}") from error
    if isinstance(result, Response) and result.status >= 400:
        raise HandlerError(f"the function answered the request with {result.status}; expected one that it answers well")


__all__ = ["execution_order"]
