"""vLLM's executor for a group. It sends the scheduler's decisions to every worker; results come from the last one."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from medusa_runtime.errors import EngineError, MedusaError
from medusa_runtime.timeline import Timeline
from vllm.v1.executor.abstract import Executor

from ..forming import Worker
from ..plan import GroupPlan
from ..wire.message import Kind, Message
from ..worker_connections import WorkerConnections
from .calls import deserialize, serialize

logger = logging.getLogger(__name__)

_DUMPS = "vllm.logging_utils.dump_input"


class BrokenGroupError(EngineError):
    """A worker of the group is lost, so no step can end."""


class Calls:
    """Calls of the workers' methods, and their results."""

    def __init__(
        self, workers: list[Worker], plan: GroupPlan, timeline: Timeline, *, all_loaded: Callable[[], bool]
    ) -> None:
        """Listen to the workers. ``all_loaded`` is that of ``WorkerConnections``."""
        self.broken: BrokenGroupError | None = None
        self._group = plan.number
        self._numbers = itertools.count(1)
        self._pending: dict[tuple[int, int], Future[Any]] = {}  # (rank, number of the call) → its result
        self._lock = threading.Lock()
        self._released = False
        self.connections = WorkerConnections(
            workers, plan, timeline, on_message=self._on_message, on_lost=self._on_lost, all_loaded=all_loaded
        )

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: range) -> list[Future[Any]]:
        """Call a method of vLLM's worker in every worker, and return the results of ``ranks``, as futures.

        Raises BrokenGroupError.
        """
        number = next(self._numbers)
        futures: list[Future[Any]] = [Future() for _ in ranks]
        with self._lock:
            if self.broken is not None:
                raise self.broken
            self._pending.update({(rank, number): one for rank, one in zip(ranks, futures, strict=True)})
        try:
            self.connections.send(Message(Kind.CALL, self._group, step=number, body=serialize((method, args, kwargs))))
        except MedusaError as error:
            self._fail(str(error))
            raise BrokenGroupError(str(error)) from error
        return futures

    def release(self, keep: int) -> None:
        """Dissolve the group, like ``WorkerConnections.release``. Waiting calls end with an error."""
        self._released = True
        self.connections.release(keep)
        self._fail("the group was dissolved")

    def _fail(self, reason: str) -> None:
        """End all waiting calls with an error, and accept no more."""
        with self._lock:
            if self.broken is None and not self._released:
                self.broken = BrokenGroupError(reason)
            waiting, self._pending = list(self._pending.values()), {}
        error = self.broken or BrokenGroupError(reason)
        for one in waiting:
            one.set_exception(error)

    def _on_message(self, worker: Worker, message: Message) -> None:
        if message.kind is Kind.RESULT:
            result = deserialize(message.body)  # first: if it is none, the call waits still, and ends with the group
            with self._lock:
                waiting = self._pending.pop((worker.rank, message.step), None)
            if waiting is not None:
                waiting.set_result(result)

    def _on_lost(self, worker: Worker, error: MedusaError) -> None:
        self._fail(f"worker {worker.rank} is lost: {error}")


class GroupExecutor(Executor):  # type: ignore[misc]
    """vLLM's executor over the workers of a group."""

    supports_pp = True

    def __init__(self, vllm_config: Any, calls: Calls) -> None:
        logging.getLogger(_DUMPS).setLevel(logging.CRITICAL)  # vLLM logs pages about a step whose worker was lost
        self._calls = calls
        size = len(calls.connections.workers)
        self._all, self._last = range(size), range(size - 1, size)
        super().__init__(vllm_config)

    def _init_executor(self) -> None:
        """Do nothing: the workers load by themselves."""

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
    ) -> Any:
        if not isinstance(method, str):
            raise EngineError("the workers of a group take no functions, only names of their methods")
        futures = self._calls.call(method, args, kwargs or {}, self._all)
        return futures if non_block else [one.result(timeout) for one in futures]

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        return self._by_the_last("execute_model", scheduler_output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self._by_the_last("sample_tokens", grammar_output, non_block)

    def _by_the_last(self, method: str, argument: Any, non_block: bool) -> Any:
        (future,) = self._calls.call(method, (argument,), {}, self._last)
        return future if non_block else future.result()

    def check_health(self) -> None:
        if self._calls.broken is not None:
            raise self._calls.broken

    def shutdown(self) -> None:
        """Do nothing: the connections outlive the core, and the leader releases them."""


__all__ = ["BrokenGroupError", "Calls", "GroupExecutor"]
