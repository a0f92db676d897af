"""The source: an instance that lets others run its prefills, because it is overloaded, or because it only decodes."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any

from medusa_runtime.config import Settings
from medusa_runtime.engine.gpu.device import Gpu, is_full
from medusa_runtime.engine.serving.sequence import Sequence, Span
from medusa_runtime.engine.torch.engine import TorchEngine, step_error
from medusa_runtime.errors import EngineError, MedusaError
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline
from torch import Tensor

from ..identity import Heartbeats, disagreement, identity_of
from ..plan import GroupPlan
from ..wire.channel import Greeting, Listener, TcpChannel, close_with, error_of
from ..wire.message import Kind, Message, json_message
from .handover import BATCH_TOKENS, Batch, Handover, HandoverReader, grouped, offer, read_in

logger = logging.getLogger(__name__)

_MOST_BATCHES = 4  # in the queue of one that relieves others: so many it may finish alone, once it has all layers
_WHOLE_STEPS = 4  # how many times the tokens of a step a prompt may have that another instance computes


class Pair:
    """A target that helps. The thread that listens to it sets what its heartbeats say."""

    def __init__(self, channel: TcpChannel, heartbeats: Heartbeats) -> None:
        self.channel = channel
        self.heartbeats = heartbeats
        self.offered: dict[int, Batch] = {}
        self.arrived: deque[Handover] = deque()
        self.pulled = False  # a pull has not been answered yet, or its answer is still in our inbox
        self.due = False  # a handover may come; the listening thread resets this
        self.loading = True  # it lacks layers
        self.leaving = False  # it gets no more offers
        self.relieves = False  # while it loads, it runs first layers for those that have all of them

    @property
    def tokens(self) -> int:
        """Return how many tokens it was offered and has not handed over yet."""
        return sum(span.stop for batch in self.offered.values() for span in batch.spans)

    @property
    def is_busy(self) -> bool:
        """True while it has its next batch already. What waits behind that one gains no layers meanwhile."""
        return len(self.offered) > 1 and self.tokens >= 2 * BATCH_TOKENS

    @property
    def is_full(self) -> bool:
        """True if it has as many batches as one that relieves others should have at once."""
        return len(self.offered) >= _MOST_BATCHES


class SourceEngine(TorchEngine):
    """The engine of an instance that others can help, and that listens for them. Alone it is a torch engine."""

    def __init__(
        self, region: Region, settings: Settings, timeline: Timeline, plan: GroupPlan, gpu: Gpu | None = None
    ) -> None:
        self.plan = plan
        self._pairs: list[Pair] = []
        self._free_slots = threading.BoundedSemaphore(plan.size - 1)  # for accepted partners
        self._next_batch = 1
        self._backlog: deque[Batch] = deque()  # for partners that have enough to do now
        self.layers_helped = 0  # layers of batches that targets have run
        self.layers_relieved = 0  # of these, layers of batches with which another target went on
        super().__init__(region, settings, timeline, gpu)
        # Others compute long prompts in one step, for which they have memory up to some length.
        self._most_whole = _WHOLE_STEPS * settings.max_batched_tokens if plan.mode == "disaggregated" else 0
        self._pair_listener: Listener | None = None
        if plan.partners_address is not None:
            host, port = plan.partners_address
            link = plan.emulated_link()
            self._pair_listener = Listener(
                host, port, group=plan.number, access=plan.access, accept=self._accept, link=link
            )

    def stats(self) -> dict[str, Any]:
        pairs = list(self._pairs)
        offered = sum(len(pair.offered) for pair in pairs)
        return (
            super().stats()
            | {"paired": len(pairs), "offered": offered, "layers_helped": self.layers_helped}
            | {"layers_relieved": self.layers_relieved}
        )

    def close(self) -> None:
        if self._pair_listener is not None:
            self._pair_listener.close()
        for pair in list(self._pairs):
            pair.channel.close()
            pair.heartbeats.close()
        super().close()

    def _accept(self, greeting: Greeting) -> None:
        """Take a new instance as a partner, or refuse it. Called in the listener's thread."""
        ours = identity_of(self._region, self._model.config, self._dtype, size=self.plan.size, gpu=self._gpu)
        reason = disagreement(ours, greeting.values)
        if reason is None and not self._takes_requests():
            reason = "this instance works for another one"
        if reason is None and (greeting.purpose != "live" or not self._free_slots.acquire(blocking=False)):
            reason = "this instance has its partners already"
        if reason is not None:
            error = EngineError(f"live scaling was refused: {reason}")
            logger.warning("%s", error)
            close_with(greeting.channel, self.plan.number, error)
            return
        pair = Pair(greeting.channel, Heartbeats(self.plan.number, 0, greeting.channel.send, dict))
        self._inbox.post(lambda: self._begin_pair(pair))

    def _takes_requests(self) -> bool:
        """Return whether this is an instance with requests of its own."""
        return True

    def _begin_pair(self, pair: Pair) -> None:
        pair.channel.last_received_at = time.monotonic()  # nobody has listened to it yet, perhaps for a whole load
        self._pairs.append(pair)
        self._timeline.mark("paired")
        threading.Thread(target=self._listen, args=(pair,), name="live-target", daemon=True).start()

    def _listen(self, pair: Pair) -> None:
        error: MedusaError = EngineError("its connection broke")
        reader = HandoverReader(pair.offered.get)
        try:
            while (message := pair.channel.receive()) is not None:
                if message.kind is Kind.HEARTBEAT:
                    values = message.values()
                    pair.leaving |= bool(values.get("leaving"))  # before it counts as one with all layers
                    pair.loading = bool(values.get("loading"))
                    pair.relieves = bool(values.get("relieves"))
                elif message.kind is Kind.ERROR:
                    raise error_of(message)
                elif (handover := reader.take(message, self._cache)) is not None:
                    if not pair.due:
                        raise EngineError("it handed over a batch without having been asked")
                    pair.due = False
                    self._inbox.post(lambda handover=handover: self._take(pair, handover))  # type: ignore[misc]
        except MedusaError as found:
            error = found
        except (IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as found:
            error = EngineError(f"it sent something that could not be read: {found!r}")
        self._inbox.post(lambda: self._lose(pair, error))

    # The methods from here on run in the thread of ``run``.

    def _run_next_step(self) -> bool:
        if not self._pairs:
            self._backlog.clear()  # its prompts are still in the scheduler
            return super()._run_next_step()
        worked = False
        for pair in list(self._pairs):
            if time.monotonic() - pair.channel.last_received_at > self.plan.silent_s:
                self._lose(pair, EngineError(f"it has been silent for {self.plan.silent_s:g} s"))
            elif pair.arrived:
                self._take_back(pair, pair.arrived.popleft())
                worked = True
        batches = [*self._backlog, *(batch for pair in self._pairs for batch in pair.offered.values())]
        busy = {span.sequence for batch in batches for span in batch.spans}
        staying = [pair for pair in self._pairs if not pair.leaving]
        # A prompt does not wait for layers that somebody has. Without such a partner, this instance is relieved by one
        # that loads, and so computes at most a step at once.
        loaded = self._loaded()
        spans = self._scheduler.schedule(busy, whole=self._most_whole if loaded else 0)
        whole = [span for span in spans if _is_whole_prompt(span)] if staying else []
        ours = [span for span in spans if span not in whole]
        self._backlog += [self._batch(group) for group in grouped(whole)]
        if loaded:
            self._deal(loaded)
        elif staying:
            while self._backlog:
                self._offer(_idlest(staying), self._backlog.popleft())
        else:
            self._backlog.clear()
        if ours:
            self._step(ours)
        for pair in list(self._pairs):
            self._pull_or_release(pair)
        return worked or bool(spans)

    def _loaded(self) -> list[Pair]:
        """Return the partners that have all layers, and stay."""
        return [pair for pair in self._pairs if not pair.leaving and not pair.loading]

    def _relieving(self) -> list[Pair]:
        """Return the partners that load, and run first layers for those that have all."""
        return [pair for pair in self._pairs if pair.relieves and pair.loading and not pair.leaving]

    def _deal(self, loaded: list[Pair]) -> None:
        """Give the prompts that wait here to partners with all layers, as soon as these are idle.

        Beside one that relieves them they get them from its queue, in which batches gain layers while they wait.
        """
        relieving = self._relieving()
        while self._backlog:
            queued = any(pair.offered for pair in relieving)
            takers = [] if queued else [pair for pair in loaded if not pair.is_busy]
            takers = takers or [pair for pair in relieving if not pair.is_full]
            if not takers:
                break
            self._offer(_idlest(takers), self._backlog.popleft())

    def _pull_or_release(self, pair: Pair) -> None:
        """Pull the partner's next batch, or part with it."""
        waits = pair.relieves and pair.loading and not pair.leaving and self._are_busy()
        if pair.offered and not pair.pulled and not pair.arrived and not waits:
            pair.pulled = pair.due = True
            self._send(pair, Message(Kind.PULL, self.plan.number))
        elif pair.leaving and not pair.offered:
            self._release_pair(pair)

    def _are_busy(self) -> bool:
        """Return whether all partners with all layers have enough to do, with what has been pulled for them."""
        loaded = self._loaded()
        coming = sum(pair.pulled or bool(pair.arrived) for pair in self._relieving())
        return bool(loaded) and sum(not pair.is_busy for pair in loaded) <= coming

    def _send(self, pair: Pair, message: Message) -> None:
        try:
            pair.channel.send(message)
        except EngineError as error:
            self._lose(pair, error)

    def _batch(self, spans: list[Span]) -> Batch:
        number, self._next_batch = self._next_batch, self._next_batch + 1
        return Batch(number, spans, [span.sequence.blocks for span in spans], time.monotonic_ns())

    def _offer(self, pair: Pair, batch: Batch) -> None:
        alive = batch.alive
        if not alive:
            return
        if len(alive) < len(batch.spans):  # some prompts were cancelled, or have lost their blocks
            batch = batch._replace(spans=alive, tables=[span.sequence.blocks for span in alive])
        pair.offered[batch.number] = batch._replace(hidden=None)  # it has left
        for message in offer(self.plan.number, batch):
            self._send(pair, message)

    def _take(self, pair: Pair, handover: Handover) -> None:
        if pair in self._pairs:
            pair.pulled = False
            pair.arrived.append(handover)

    def _use_idle_time(self) -> bool:
        # A partner's batch may arrive at any moment, and does not wait for anything.
        return not self._pairs and super()._use_idle_time()

    def _take_back(self, pair: Pair, handover: Handover) -> None:
        """Run the rest of a batch, or let a partner with all layers do that."""
        loaded = self._loaded()
        try:
            if loaded and handover.done < self.layers.total:
                self._pass_on(pair, handover, _idlest(loaded))
            else:
                self._finish(pair, handover)
        except RuntimeError as error:
            if not is_full(error):
                raise
            self._lose(pair, step_error(error))  # its prompts are computed here, in smaller steps

    def _receive(self, pair: Pair, handover: Handover) -> Batch | None:
        """Keep the keys and values of a batch. Return what is left of it, with its hidden states; None: nothing."""
        batch = pair.offered.pop(handover.number, None)
        if batch is None:
            return None
        if handover.caches and [parts[0].shape[2] for parts in handover.caches] != batch.lengths:
            self._lose(pair, EngineError("it handed over other prompts than it was offered"))
            return None
        if handover.hidden is not None and not self._is_ours(handover.hidden):
            self._lose(pair, EngineError("it handed over hidden states of another size or type than this model's"))
            return None
        rows: list[int] = []
        row = 0
        for index, (sequence, _, stop) in enumerate(batch.spans):
            if sequence.blocks is batch.tables[index]:
                rows += range(row, row + stop)
                if handover.caches:
                    read_in(self._cache, sequence, handover.caches[index], batch.done)
            row += stop
        alive = batch.alive
        if not alive:
            return None
        hidden = handover.hidden if handover.hidden is None or len(rows) == row else handover.hidden[rows]
        tables = [span.sequence.blocks for span in alive]
        return batch._replace(spans=alive, tables=tables, done=handover.done, hidden=hidden)

    def _pass_on(self, pair: Pair, handover: Handover, onto: Pair) -> None:
        """Have another partner go on with a batch. The keys and values of its first layers stay here."""
        batch = self._receive(pair, handover)
        if batch is not None:
            if batch.done and not self.layers_relieved:
                self._timeline.mark("relieved")
            self.layers_relieved += batch.done
            self._offer(onto, batch)

    def _finish(self, pair: Pair, handover: Handover) -> None:
        """Run the layers of a batch that targets have not run, and sample its tokens."""
        batch = self._receive(pair, handover)
        if batch is None:
            return
        alive, hidden = batch.alive, batch.hidden
        forward, total = self.runner.forward(alive, hidden), self.layers.total
        last = max(total - 1, handover.done)
        forward.run_layers(handover.done, last)
        self._pull_or_release(pair)  # the next batch arrives while the last layer runs
        forward.run_layers(last, total)
        self.layers_helped += handover.done
        forward.score_prompts()
        ends = [index for index, span in enumerate(alive) if span.stop == len(span.sequence.tokens)]
        sequences = [alive[index].sequence for index in ends]
        self._constraints.request_masks(alive)
        sampled = self._sample(forward.logits(ends), sequences) if ends else []
        for sequence, _, stop in alive:
            sequence.computed = stop
        self._deliver(alive, sequences, sampled, batch.began_ns)

    def _is_ours(self, hidden: Tensor) -> bool:
        return hidden.shape[1] == self._model.config.hidden_size and hidden.dtype == self._dtype

    def _lose(self, pair: Pair, error: MedusaError) -> None:
        """Go on without a partner. The prompts that it was offered are still in the scheduler."""
        if pair in self._pairs:
            logger.warning("a partner is lost: %s; going on without it", error)
            self._timeline.mark("unpaired", reason=str(error))
            self._remove_pair(pair)

    def _release_pair(self, pair: Pair) -> None:
        """Release a partner that has handed over everything. From here on both are instances."""
        try:
            pair.channel.send(json_message(Kind.RELEASE, self.plan.number, {"as": "instance"}))
            pair.channel.flush(1.0)
        except MedusaError:
            pass
        self._timeline.mark("unpaired", reason="both are instances")
        self._remove_pair(pair)

    def _remove_pair(self, pair: Pair) -> None:
        self._pairs.remove(pair)
        self._free_slots.release()
        pair.heartbeats.close()
        pair.channel.close()


def _idlest(pairs: list[Pair]) -> Pair:
    return min(pairs, key=lambda pair: pair.tokens)


def _is_whole_prompt(span: Span) -> bool:
    sequence: Sequence = span.sequence
    return span.start == 0 and span.stop == len(sequence.tokens) and span.stop > 1


__all__ = ["SourceEngine"]
