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
from medusa_runtime.engine.serving.sequence import Sequence, Span
from medusa_runtime.engine.torch.kv_cache import BLOCK_TOKENS
from medusa_runtime.engine.torch.paged_attention import PagedAttention
from medusa_runtime.engine.torch.runner import positions_of, tokens_of
from medusa_runtime.errors import MedusaError
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

from .consolidation import Consolidation
from .crew import Crew
from .forming import Worker, form
from .gathering import Gathering, Source
from .member import Member
from .plan import GroupPlan, PlanFile
from .steps import StepWriter, has_prompts, packed_bits, sampled_of, take_back
from .wire.message import Kind, Message, hidden_states, packed

logger = logging.getLogger(__name__)

_PLAN_S = 0.25  # between two readings of the group's file


class Flight(NamedTuple):
    """A step whose tokens have not arrived yet. ``ends`` are the sequences that get a token in it."""

    spans: list[Span]
    ends: list[Sequence]
    began_ns: int


class Leader(Member):
    """The engine of rank 0; see the module. Unless said otherwise, methods run in the thread of ``run``."""

    def __init__(self, region: Region, settings: Settings, timeline: Timeline, plan: GroupPlan) -> None:
        self._crew: Crew | None = None  # None: this engine is alone
        self._flights: dict[int, Flight] = {}
        self._busy: set[Sequence] = set()
        self._next_step = 1
        self._writer = StepWriter()
        self._move: Consolidation | None = None
        self._served = threading.Event()  # set once every layer is loaded in some worker
        super().__init__(region, settings, timeline, plan)

    def wait_ready(self) -> None:
        """Wait until every layer is loaded, in one of the workers."""
        super().wait_ready()
        self._served.wait()
        self._check_loaded()

    def run(self, stop: threading.Event) -> None:
        self._form(stop)
        try:
            super().run(stop)
        finally:
            if self._crew is not None:
                self._release(1)

    def stats(self) -> dict[str, Any]:
        workers = 1 if self._crew is None else self.plan.size
        return super().stats() | {"workers": workers, "steps_under_way": len(self._flights)}

    def consolidate(self, then: str = "down") -> None:
        """Begin to gather all requests in this worker, which then goes on alone. Can be called in any thread.

        Does nothing unless all layers are loaded here.
        """
        self._inbox.post(lambda: self._consolidate(then))

    def close(self) -> None:
        self._served.set()
        super().close()

    @property
    def _needs_rest(self) -> bool:
        return self._crew is None

    # Forming and losing the group.

    def _form(self, stop: threading.Event) -> None:
        """Wait for the other workers and form the group. If they do not come, go on alone."""
        try:
            with self._timeline.stage("form", size=self.plan.size):
                workers = form(self.plan, self.layers, self.identity, self.link, stop.is_set)
        except MedusaError as error:
            if not stop.is_set():
                self._alone(f"no group was formed: {error}")
            return
        least = min([self._cache.blocks.blocks, *(worker.blocks for worker in workers)])
        if least * BLOCK_TOKENS < self.info.max_model_len:
            for worker in workers:
                worker.close()
            room = f"{least * BLOCK_TOKENS} tokens of keys and values"
            self._alone(f"a worker has room for {room}, and one sequence may need {self.info.max_model_len}")
            return
        self._cache.blocks.limit(least)

        def lose(worker: Worker, error: MedusaError) -> None:
            self._inbox.post(lambda: self._lose(worker, error))

        self._crew = Crew(
            workers, self.plan, self._timeline, take=self._take_message, lose=lose, served=self._look_served
        )

    def _take_message(self, _: Worker, message: Message) -> None:
        """Take a worker's message. Called in a thread of the crew."""
        if message.kind is Kind.TOKENS:
            self._inbox.post(lambda: self._land(message))

    def _look_served(self) -> bool:
        """Return whether every worker of the group has its layers. Can be called in any thread.

        Also sets ``_served``, if each layer is loaded somewhere.
        """
        crew = self._crew
        if crew is None:
            served = self.full.is_set() or self._rest_error is not None
        else:
            self._pace.group_loaded |= self.loaded and crew.loaded
            served = self._pace.group_loaded
        if served:
            self._served.set()
        return self._pace.group_loaded

    def _lose(self, worker: Worker, error: MedusaError) -> None:
        if self._crew is not None and worker in self._crew.workers:
            self._fall_back(f"worker {worker.rank} is lost: {error}")

    def _fall_back(self, reason: str) -> None:
        """Go on alone with all requests. Keys and values that were not gathered are computed again from the tokens."""
        move = self._move
        for flight in self._flights.values():
            for sequence in flight.ends:
                take_back(sequence)
        self._flights.clear()
        self._busy.clear()
        for sequence in list(self._scheduler.running):
            self._scheduler.restart(sequence, 0 if move is None else move.held_tokens(sequence))
        self._release(self.plan.size if self.plan.then == "up" else 1)
        self._alone(reason)

    def _alone(self, reason: str) -> None:
        logger.warning("%s; going on alone with all layers", reason)
        self._timeline.mark("alone", reason=reason)
        self._pace.alone()
        self.load_rest_now()
        self._look_served()

    def _release(self, keep: int) -> None:
        """Dissolve the group: the first ``keep`` workers become instances, this one among them, and the others end."""
        crew, self._crew = self._crew, None
        assert crew is not None
        self._pace.alone()
        if self._move is not None:
            self._move.close()
            self._move = None
        crew.release(keep)

    # Steps.

    def _run_next_step(self) -> bool:
        if self._crew is None:
            return super()._run_next_step()
        if self._move is not None and self._move.draining:
            if not self._flights:
                self._move.gather_last(self._scheduler.running)
            return False
        if len(self._flights) >= self.plan.size:
            return False
        share = -(-len(self._scheduler.running) // self.plan.size)
        spans = self._scheduler.schedule(self._busy, max(share, 1))
        if spans:
            self._launch(spans)
        return bool(spans)

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

    def _launch(self, spans: list[Span]) -> None:
        """Begin a step: describe it to all workers, run the first layers, and send on the hidden states."""
        crew, step, number = self._crew, self._next_step, self.plan.number
        assert crew is not None
        hidden_channel = crew.workers[0].hidden
        assert hidden_channel is not None
        allowed = self._allowed(spans)
        spans = [span for span in spans if not span.sequence.cancelled]
        if not spans:
            return
        self._next_step += 1
        self._pace.used(prompts=has_prompts(spans))
        ends = [sequence for sequence, _, stop in spans if stop == len(sequence.tokens)]
        self._flights[step] = Flight(spans, ends, time.monotonic_ns())
        self._busy.update(span.sequence for span in spans)
        message = packed(Kind.STEP, number, self._writer.describe(spans, allowed), step=step)
        try:
            crew.send(message)
            attention = PagedAttention(self._cache, spans)
            places = positions_of(spans)
            hidden = self._model.embed(tokens_of(spans), places)
            hidden = self._model.run_layers(hidden, places, attention, self.layers.start, self.layers.stop)
            for span in spans:
                span.sequence.computed = span.stop
            hidden_channel.send(hidden_states(number, step, 0, hidden))
        except MedusaError as error:
            self._check_loaded()
            self._fall_back(f"step {step} could not be sent: {error}")
        except Exception as error:
            logger.exception("a step of the group failed")
            self._fall_back(f"step {step} failed: {type(error).__name__}: {error}")

    def _land(self, message: Message) -> None:
        """Take the tokens of a step from the last worker."""
        flight = self._flights.pop(message.step, None)
        if flight is None:
            return
        try:
            sampled = sampled_of(message.values(), len(flight.ends), self.info.vocab_size)
        except MedusaError as error:
            self._flights[message.step] = flight
            self._fall_back(str(error))
            return
        self._busy.difference_update(span.sequence for span in flight.spans)
        present = [
            (sequence, token)
            for sequence, token in zip(flight.ends, sampled, strict=True)
            if self._requests.get(sequence.id) is sequence
        ]
        self._deliver(
            flight.spans, [sequence for sequence, _ in present], [token for _, token in present], flight.began_ns
        )

    def _release_sequence(self, sequence: Sequence) -> None:
        self._writer.forget(sequence)
        super()._release_sequence(sequence)

    # The end of the group in good order (ParaServe §6).

    def on_full(self) -> None:
        self._look_served()
        threading.Thread(target=self._follow_plan, name="group-plan", daemon=True).start()

    def _follow_plan(self) -> None:
        """Read the group's file until it says what the workers become. Runs in a thread of its own."""
        assert self._settings.group is not None
        file = PlanFile(self._settings.group, self.plan)
        while self._crew is not None and not self._closing.is_set():
            plan = file.look()
            if plan.then != "stay":
                self._inbox.post(lambda plan=plan: self._consolidate(plan.then, plan.keep))  # type: ignore[misc]
                return
            self._closing.wait(_PLAN_S)

    def _consolidate(self, then: str, keep: int = 0) -> None:
        if self._crew is None or self._move is not None or not self.full.is_set():
            return
        sources = [Source(worker.layers, worker.gathered) for worker in self._crew.workers if worker.gathered]

        def done(error: MedusaError | None) -> None:
            self._inbox.post(lambda: self._gathered(error))

        gathering = Gathering(self._cache, sources, self.plan.number, done)
        self._move = Consolidation(gathering, (keep or self.plan.size) if then == "up" else 1)
        self._move.begin(self._scheduler.running, self._settled)

    def _settled(self, sequence: Sequence) -> int:
        """Return how many tokens of a sequence have keys and values in every worker."""
        for flight in self._flights.values():
            for span in flight.spans:
                if span.sequence is sequence:
                    return min(span.start, sequence.computed)
        return sequence.computed

    def _gathered(self, error: MedusaError | None) -> None:
        move = self._move
        if move is None or self._crew is None:
            return
        if error is not None:
            self._fall_back(str(error))
        elif move.ended(self._scheduler.running, self._settled):
            self._timeline.record("gather", move.began_ns, time.monotonic_ns(), **move.detail())
            self._timeline.mark("consolidated", kept=move.keep)
            self._release(move.keep)


__all__ = ["Flight", "Leader"]
