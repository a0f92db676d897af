"""The leader of a group. It has the requests, the scheduler and the first layers, and will have all layers.

    schedule ─step▶ every worker      at most as many steps under way as there are workers
             ─hidden▶ 1 ─hidden▶ 2 … ─tokens▶ leader ─delta▶ sink

Text, random numbers and block tables never leave the leader, so it can go on alone at any moment. When the group is
dissolved in good order, it gathers the other workers' keys and values. When a worker is lost, it computes them again.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any, NamedTuple

import torch
from medusa_runtime.config import Settings
from medusa_runtime.engine.gpu.device import Gpu
from medusa_runtime.engine.serving.sequence import Sequence, Span
from medusa_runtime.engine.torch.engine import step_error
from medusa_runtime.engine.torch.kv_cache import BLOCK_TOKENS, blocks_for
from medusa_runtime.errors import DeviceError, MedusaError
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

from .consolidation import Consolidation
from .forming import Worker, form
from .gathering import BlockSource, Gathering
from .plan import GroupPlan, PlanFile
from .steps import StepWriter, has_prompts, packed_bits, read_scores, read_tokens, undo_draw
from .wire.message import Kind, Message, hidden_states, json_message
from .worker_connections import WorkerConnections
from .worker_engine import WorkerEngine

logger = logging.getLogger(__name__)

_PLAN_S = 0.25  # between two readings of the group's file


class InFlightStep(NamedTuple):
    """A step whose tokens have not arrived yet. ``ends`` are the sequences that get a token in it.

    ``blocks`` are those that it writes to. Others may share them, also when the sequences of the step have ended.
    """

    spans: list[Span]
    ends: list[Sequence]
    blocks: frozenset[int]
    began_ns: int


class Leader(WorkerEngine):
    """The engine of rank 0; see the module. Unless said otherwise, methods run in the thread of ``run``."""

    def __init__(
        self, region: Region, settings: Settings, timeline: Timeline, plan: GroupPlan, gpu: Gpu | None = None
    ) -> None:
        self._connections: WorkerConnections | None = None  # None: this engine is alone
        self._in_flight: dict[int, InFlightStep] = {}
        self._busy: set[Sequence] = set()
        self._next_step = 1
        self._writer = StepWriter()
        self._consolidation: Consolidation | None = None
        self._all_loaded = threading.Event()  # set once every layer is loaded in some worker
        super().__init__(region, settings, timeline, plan, gpu)

    def wait_ready(self) -> None:
        """Wait until every layer is loaded, in one of the workers."""
        super().wait_ready()
        self._all_loaded.wait()
        self._check_loaded()

    def run(self, stop: threading.Event) -> None:
        self.runner.prepare(eagerly=True)
        self._form(stop)
        try:
            super().run(stop)
        finally:
            if self._connections is not None:
                self._release(1)

    def stats(self) -> dict[str, Any]:
        workers = 1 if self._connections is None else self.plan.size
        return super().stats() | {"workers": workers, "steps_under_way": len(self._in_flight)}

    def consolidate(self, then: str = "down") -> None:
        """Begin to gather all requests in this worker, which then goes on alone. Can be called in any thread.

        Does nothing unless all layers are loaded here.
        """
        self._inbox.post(lambda: self._consolidate(then))

    def close(self) -> None:
        self._all_loaded.set()
        super().close()

    @property
    def _needs_rest(self) -> bool:
        return self._connections is None

    # Forming and losing the group.

    def _form(self, stop: threading.Event) -> None:
        """Wait for the other workers and form the group. If they do not come, go on alone."""
        try:
            with self._timeline.stage("form", size=self.plan.size):
                workers = form(self.plan, self.layers, self.identity, self.link, stop.is_set)
        except MedusaError as error:
            if not stop.is_set():
                self._go_alone(f"no group was formed: {error}")
            return
        least = min([self._cache.blocks.blocks, *(worker.blocks for worker in workers)])
        if least * BLOCK_TOKENS < self.info.max_model_len:
            for worker in workers:
                worker.close()
            room = f"{least * BLOCK_TOKENS} tokens of keys and values"
            self._go_alone(f"a worker has room for {room}, and one sequence may need {self.info.max_model_len}")
            return
        self._cache.blocks.limit(least)

        def on_lost(worker: Worker, error: MedusaError) -> None:
            self._inbox.post(lambda: self._lose(worker, error))

        self._connections = WorkerConnections(
            workers,
            self.plan,
            self._timeline,
            on_message=self._on_message,
            on_lost=on_lost,
            all_loaded=self._check_all_loaded,
        )

    def _on_message(self, _: Worker, message: Message) -> None:
        """Take a worker's message. Called in a thread of the connections."""
        if message.kind is Kind.TOKENS:
            self._inbox.post(lambda: self._end_step(message))

    def _check_all_loaded(self) -> bool:
        """Return whether every worker of the group has its layers. Can be called in any thread.

        Also sets ``_all_loaded``, if each layer is loaded somewhere.
        """
        connections = self._connections
        if connections is None:
            all_loaded = self.full.is_set() or self._rest_error is not None
        else:
            self._throttle.group_loaded |= self.loaded and connections.loaded
            all_loaded = self._throttle.group_loaded
        if all_loaded:
            self._all_loaded.set()
        return self._throttle.group_loaded

    def _lose(self, worker: Worker, error: MedusaError) -> None:
        if self._connections is not None and worker in self._connections.workers:
            self._fall_back(f"worker {worker.rank} is lost: {error}")

    def _fall_back(self, reason: str) -> None:
        """Go on alone with all requests. Keys and values that were not gathered are computed again from the tokens."""
        consolidation = self._consolidation
        for in_flight in self._in_flight.values():
            for sequence in in_flight.ends:
                undo_draw(sequence)
        self._in_flight.clear()
        self._busy.clear()
        for sequence in list(self._scheduler.running):
            self._scheduler.rewind(sequence, 0 if consolidation is None else consolidation.gathered_tokens(sequence))
        self._release(self.plan.size if self.plan.then == "up" else 1)
        self._go_alone(reason)

    def _go_alone(self, reason: str) -> None:
        logger.warning("%s; going on alone with all layers", reason)
        self._timeline.mark("alone", reason=reason)
        self._throttle.release()
        self.load_rest_now()
        self._check_all_loaded()

    def _release(self, keep: int) -> None:
        """Dissolve the group: the first ``keep`` workers become instances, this one among them, and the others end."""
        connections, self._connections = self._connections, None
        assert connections is not None
        self._scheduler.forget_prefixes()  # what was kept of ended requests has not been gathered
        self._throttle.release()
        self._check_all_loaded()  # the other workers may not have had theirs, and will report nothing more
        if self._consolidation is not None:
            self._consolidation.close()
            self._consolidation = None
        connections.release(keep)

    # Steps.

    def _run_next_step(self) -> bool:
        if self._connections is None:
            return super()._run_next_step()
        if self._consolidation is not None and self._consolidation.draining:
            if not self._in_flight:
                self._consolidation.gather_last(self._scheduler.running)
            return False
        if len(self._in_flight) >= self.plan.size:
            return False
        share = -(-len(self._scheduler.running) // self.plan.size)
        spans = self._scheduler.schedule(self._busy, max(share, 1))
        if spans:
            self._begin_step(spans)
        return bool(spans)

    def _use_idle_time(self) -> bool:
        # Other workers wait for this one's next step, so that it does nothing else meanwhile.
        return self._connections is None and super()._use_idle_time()

    def _allowed(self, spans: list[Span]) -> dict[Sequence, bytes]:
        """Return which tokens may come next, for sequences that follow a grammar.

        Ends those that get no further token.
        """
        following = [
            sequence
            for sequence, _, stop in spans
            if sequence.params.structured_outputs is not None and stop == len(sequence.tokens)
        ]
        if not following:
            return {}
        self._constraints.request_masks(spans)
        rows = torch.zeros(len(following), self.info.vocab_size)
        for ended in self._constraints.apply(rows, following):
            ended.sequence.cancelled = True
            self._requests.end(ended.sequence, "error" if ended.error else "stop", ended.error)
        return {sequence: packed_bits(row == 0) for sequence, row in zip(following, rows, strict=True)}

    def _begin_step(self, spans: list[Span]) -> None:
        """Begin a step: describe it to all workers, run the first layers, and send on the hidden states."""
        connections, step, number = self._connections, self._next_step, self.plan.number
        assert connections is not None
        hidden_channel = connections.workers[0].hidden_channel
        assert hidden_channel is not None
        allowed = self._allowed(spans)
        spans = [span for span in spans if not span.sequence.cancelled]
        if not spans:
            return
        self._next_step += 1
        self._throttle.note_step(prompts=has_prompts(spans))
        ends = [sequence for sequence, _, stop in spans if stop == len(sequence.tokens)]
        blocks = frozenset(
            block for one, start, stop in spans for block in one.blocks[start // BLOCK_TOKENS : blocks_for(stop)]
        )
        self._in_flight[step] = InFlightStep(spans, ends, blocks, time.monotonic_ns())
        self._busy.update(span.sequence for span in spans)
        message = json_message(Kind.STEP, number, self._writer.describe(spans, allowed), step=step)
        try:
            connections.send(message)
            forward = self.runner.forward(spans)
            forward.run_layers(self.layers.start, self.layers.stop)
            for span in spans:
                span.sequence.computed = span.stop
            hidden_channel.send(hidden_states(number, step, 0, forward.hidden()))
        except MedusaError as error:
            self._check_loaded()
            self._fall_back(f"step {step} could not be sent: {error}")
        except Exception as error:
            failure = step_error(error)
            if not isinstance(failure, DeviceError):  # of a full GPU, the message says everything
                logger.exception("a step of the group failed")
            self._fall_back(f"step {step} failed: {failure}")

    def _end_step(self, message: Message) -> None:
        """Take the tokens of a step from the last worker."""
        in_flight = self._in_flight.pop(message.step, None)
        if in_flight is None:
            return
        try:
            values = message.values()
            sampled = read_tokens(values, len(in_flight.ends), self.info.vocab_size)
            read_scores(values, in_flight.spans, self.info.vocab_size)
        except MedusaError as error:
            self._in_flight[message.step] = in_flight
            self._fall_back(str(error))
            return
        self._busy.difference_update(span.sequence for span in in_flight.spans)
        present = [
            (sequence, token)
            for sequence, token in zip(in_flight.ends, sampled, strict=True)
            if self._requests.get(sequence.id) is sequence
        ]
        self._deliver(
            in_flight.spans, [sequence for sequence, _ in present], [token for _, token in present], in_flight.began_ns
        )

    def _release_sequence(self, sequence: Sequence) -> None:
        self._writer.forget(sequence)
        super()._release_sequence(sequence)

    # The end of the group in good order (ParaServe §6).

    def on_full(self) -> None:
        self._check_all_loaded()
        threading.Thread(target=self._follow_plan, name="group-plan", daemon=True).start()

    def _follow_plan(self) -> None:
        """Read the group's file until it says what the workers become. Runs in a thread of its own."""
        assert self._settings.group is not None
        file = PlanFile(self._settings.group, self.plan)
        while self._connections is not None and not self._closing.is_set():
            plan = file.reload()
            if plan.then != "stay":
                self._inbox.post(lambda plan=plan: self._consolidate(plan.then, plan.keep))  # type: ignore[misc]
                return
            self._closing.wait(_PLAN_S)

    def _consolidate(self, then: str, keep: int = 0) -> None:
        if self._connections is None or self._consolidation is not None or not self.full.is_set():
            return
        sources = [
            BlockSource(worker.layers, worker.cache_channel)
            for worker in self._connections.workers
            if worker.cache_channel
        ]

        def done(error: MedusaError | None) -> None:
            self._inbox.post(lambda: self._gathered(error))

        gathering = Gathering(self._cache, sources, self.plan.number, done)
        self._consolidation = Consolidation(gathering, (keep or self.plan.size) if then == "up" else 1)
        self._consolidation.begin(self._scheduler.running, self._computed_by_all)

    def _computed_by_all(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence have keys and values in every worker, in whole blocks if not all."""
        for number, block in enumerate(sequence.blocks[: blocks_for(sequence.computed)]):
            if any(block in in_flight.blocks for in_flight in self._in_flight.values()):
                return number * BLOCK_TOKENS
        return sequence.computed

    def _gathered(self, error: MedusaError | None) -> None:
        consolidation = self._consolidation
        if consolidation is None or self._connections is None:
            return
        if error is not None:
            self._fall_back(str(error))
        elif consolidation.ended(self._scheduler.running, self._computed_by_all):
            self._timeline.record("gather", consolidation.began_ns, time.monotonic_ns(), **consolidation.detail())
            self._timeline.mark("consolidated", kept=consolidation.keep)
            self._release(consolidation.keep)


__all__ = ["InFlightStep", "Leader"]
