"""vLLM's executor of a group: what its scheduler decides goes to every worker, and comes back from the last one."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from medusa_runtime.errors import EngineError, MedusaError
from vllm.v1.executor.abstract import Executor

from ..forming import Worker
from ..plan import GroupPlan
from ..wire.channel import error_of
from ..wire.message import Kind, Message, packed
from .calls import read, written

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
_DUMPS = "vllm.logging_utils.dump_input"


class BrokenGroupError(EngineError):
    """A worker of the group is lost, so that no step can end."""


class Crew:
    """The workers of a pipeline, as the leader sees them: calls to them, and what has become of them.

    ``on_stages`` gets what a worker's timeline says, ``on_beat`` its signs of life.
    """

    def __init__(
        self,
        workers: list[Worker],
        plan: GroupPlan,
        on_beat: Callable[[Worker, dict[str, Any]], None],
        on_stages: Callable[[Worker, dict[str, Any]], None],
    ) -> None:
        self.workers = workers
        self.broken: BrokenGroupError | None = None
        self._plan = plan
        self._on_beat, self._on_stages = on_beat, on_stages
        self._numbers = itertools.count(1)
        self._pending: dict[tuple[int, int], Future[Any]] = {}  # by the worker's rank and the call's number
        self._lock = threading.Lock()
        self._closed = threading.Event()
        for worker in workers:
            threading.Thread(target=self._listen, args=(worker,), name="group-worker", daemon=True).start()
        threading.Thread(target=self._watch, name="group-watch", daemon=True).start()

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], ranks: range) -> list[Future[Any]]:
        """Have every worker run a method of vLLM's; the answers of those of ``ranks``. Raises BrokenGroupError."""
        number = next(self._numbers)
        futures: list[Future[Any]] = [Future() for _ in ranks]
        with self._lock:
            if self.broken is not None:
                raise self.broken
            self._pending.update({(rank, number): one for rank, one in zip(ranks, futures, strict=True)})
        message = Message(Kind.CALL, self._plan.number, step=number, body=written((method, args, kwargs)))
        try:
            for worker in self.workers:
                worker.channel.send(message)
        except MedusaError as error:
            self.fail(str(error))
            raise BrokenGroupError(str(error)) from error
        return futures

    def fail(self, reason: str) -> None:
        """End all calls that wait, and take no more."""
        with self._lock:
            if self.broken is None and not self._closed.is_set():
                self.broken = BrokenGroupError(reason)
            waiting, self._pending = list(self._pending.values()), {}
        error = self.broken or BrokenGroupError(reason)
        for one in waiting:
            one.set_exception(error)

    def release(self, keep: int) -> None:
        """Dissolve the group: the first ``keep`` workers become instances, and the others end."""
        self._closed.set()
        for worker in self.workers:
            become = "instance" if 0 < worker.rank < keep else "end"
            try:
                worker.channel.send(packed(Kind.RELEASE, self._plan.number, {"as": become}))
            except MedusaError:
                pass
        self.fail("the group was dissolved")
        threading.Thread(target=self._part, name="group-release", daemon=True).start()

    def _part(self) -> None:
        """Let what was sent last leave, then close everything."""
        for worker in self.workers:
            worker.channel.flush(1.0)
        time.sleep(0.2)  # for the workers' last stages of the timeline
        for worker in self.workers:
            worker.close()

    def _listen(self, worker: Worker) -> None:
        reason = "its connection broke"
        try:
            while (message := worker.channel.receive()) is not None:
                if message.kind is Kind.RESULT:
                    with self._lock:
                        waiting = self._pending.pop((worker.rank, message.step), None)
                    if waiting is not None:
                        waiting.set_result(read(message.body))
                elif message.kind is Kind.BEAT:
                    self._on_beat(worker, message.values())
                elif message.kind is Kind.STAGES:
                    self._on_stages(worker, message.values())
                elif message.kind is Kind.ERROR:
                    raise error_of(message)
        except MedusaError as error:
            reason = str(error)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"it sent something that could not be read: {error!r}"
        self.fail(f"worker {worker.rank} is lost: {reason}")

    def _watch(self) -> None:
        while not self._closed.wait(_LOOK_S):
            for worker in self.workers:
                if time.monotonic() - worker.channel.heard > self._plan.silent_s:
                    self.fail(f"worker {worker.rank} has been silent for {self._plan.silent_s:g} s")
                    return


class GroupExecutor(Executor):  # type: ignore[misc]
    """vLLM's executor over a crew."""

    supports_pp = True

    def __init__(self, vllm_config: Any, crew: Crew) -> None:
        logging.getLogger(_DUMPS).setLevel(logging.CRITICAL)  # pages about a step whose worker was lost
        self._crew = crew
        self._last = range(len(crew.workers) - 1, len(crew.workers))
        super().__init__(vllm_config)

    def _init_executor(self) -> None:
        """The workers have begun to load by themselves."""

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
        futures = self._crew.call(method, args, kwargs or {}, range(len(self._crew.workers)))
        return futures if non_block else [one.result(timeout) for one in futures]

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        return self._by_the_last("execute_model", scheduler_output, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self._by_the_last("sample_tokens", grammar_output, non_block)

    def _by_the_last(self, method: str, argument: Any, non_block: bool) -> Any:
        (future,) = self._crew.call(method, (argument,), {}, self._last)
        return future if non_block else future.result()

    def check_health(self) -> None:
        if self._crew.broken is not None:
            raise self._crew.broken

    def shutdown(self) -> None:
        """The crew outlives its core; the leader releases it."""


__all__ = ["BrokenGroupError", "Crew", "GroupExecutor"]
