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
from .handover import Batch, Handover, HandoverReader, grouped, offer, read_in

logger = logging.getLogger(__name__)

_WHOLE_STEPS = 4  # how many times the tokens of a step a prompt may have that another instance computes


class _Pair:
    """A target that helps, and the batches that it was offered."""

    def __init__(self, channel: TcpChannel, heartbeats: Heartbeats) -> None:
        self.channel = channel
        self.heartbeats = heartbeats
        self.offered: dict[int, Batch] = {}
        self.arrived: deque[Handover] = deque()
        self.pulled = False  # a pull has not been answered yet, or its answer is still in our inbox
        self.due = False  # a handover may come; the listening thread resets this
        self.loading = True  # it lacks layers
        self.leaving = False  # it gets no more offers

    @property
    def tokens(self) -> int:
        """Return how many tokens it was offered and has not handed over yet."""
        return sum(span.stop for batch in self.offered.values() for span in batch.spans)

    def lengths(self, number: int) -> list[int] | None:
        """Return the tokens of each prompt of a batch that it was offered; from any thread."""
        batch = self.offered.get(number)
        return None if batch is None else [span.stop for span in batch.spans]


class SourceEngine(TorchEngine):
    """The engine of an instance that others can help, and that listens for them. Alone it is a torch engine."""

    def __init__(
        self, region: Region, settings: Settings, timeline: Timeline, plan: GroupPlan, gpu: Gpu | None = None
    ) -> None:
        self.plan = plan
        self._pairs: list[_Pair] = []
        self._free_slots = threading.BoundedSemaphore(plan.size - 1)  # for accepted partners
        self._next_batch = 1
        self.layers_helped = 0  # layers of batches that targets have run
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
        return super().stats() | {"paired": len(pairs), "offered": offered, "layers_helped": self.layers_helped}

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
        pair = _Pair(greeting.channel, Heartbeats(self.plan.number, 0, greeting.channel.send, dict))
        self._inbox.post(lambda: self._begin_pair(pair))

    def _takes_requests(self) -> bool:
        """Return whether this is an instance with requests of its own."""
        return True

    def _begin_pair(self, pair: _Pair) -> None:
        pair.channel.last_received_at = time.monotonic()  # nobody has listened to it yet, perhaps for a whole load
        self._pairs.append(pair)
        self._timeline.mark("paired")
        threading.Thread(target=self._listen, args=(pair,), name="live-target", daemon=True).start()

    def _listen(self, pair: _Pair) -> None:
        error: MedusaError = EngineError("its connection broke")
        reader = HandoverReader(pair.lengths)
        try:
            while (message := pair.channel.receive()) is not None:
                if message.kind is Kind.HEARTBEAT:
                    values = message.values()
                    pair.loading = bool(values.get("loading"))
                    pair.leaving |= bool(values.get("leaving"))
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
            return super()._run_next_step()
        worked = False
        for pair in list(self._pairs):
            if time.monotonic() - pair.channel.last_received_at > self.plan.silent_s:
                self._lose(pair, EngineError(f"it has been silent for {self.plan.silent_s:g} s"))
            elif pair.arrived:
                self._finish_or_lose(pair, pair.arrived.popleft())
                worked = True
        busy = {span.sequence for pair in self._pairs for batch in pair.offered.values() for span in batch.spans}
        staying = [pair for pair in self._pairs if not pair.leaving]
        # A prompt does not wait for layers that somebody has. Without such a partner, this instance is relieved by one
        # that loads, and so computes at most a step at once.
        loaded = [pair for pair in staying if not pair.loading]
        helpful = loaded or staying
        spans = self._scheduler.schedule(busy, whole=self._most_whole if loaded else 0)
        whole = [span for span in spans if _is_whole_prompt(span)] if helpful else []
        ours = [span for span in spans if span not in whole]
        for group in grouped(whole):
            self._offer(min(helpful, key=lambda pair: pair.tokens), group)
        if ours:
            self._step(ours)
        for pair in list(self._pairs):
            self._pull_or_release(pair)
        return worked or bool(spans)

    def _pull_or_release(self, pair: _Pair) -> None:
        """Pull the partner's next batch, or part with it."""
        if pair.offered and not pair.pulled and not pair.arrived:
            pair.pulled = pair.due = True
            self._send(pair, Message(Kind.PULL, self.plan.number))
        elif pair.leaving and not pair.offered:
            self._release_pair(pair)

    def _send(self, pair: _Pair, message: Message) -> None:
        try:
            pair.channel.send(message)
        except EngineError as error:
            self._lose(pair, error)

    def _offer(self, pair: _Pair, spans: list[Span]) -> None:
        number, self._next_batch = self._next_batch, self._next_batch + 1
        batch = Batch(number, spans, [span.sequence.blocks for span in spans], time.monotonic_ns())
        pair.offered[number] = batch
        self._send(pair, offer(self.plan.number, batch))

    def _take(self, pair: _Pair, handover: Handover) -> None:
        if pair in self._pairs:
            pair.pulled = False
            pair.arrived.append(handover)

    def _use_idle_time(self) -> bool:
        # A partner's batch may arrive at any moment, and does not wait for anything.
        return not self._pairs and super()._use_idle_time()

    def _finish_or_lose(self, pair: _Pair, handover: Handover) -> None:
        try:
            self._finish(pair, handover)
        except RuntimeError as error:
            if not is_full(error):
                raise
            self._lose(pair, step_error(error))  # its prompts are computed here, in smaller steps

    def _finish(self, pair: _Pair, handover: Handover) -> None:
        """Run the layers of a batch that the target has not run, and sample its tokens."""
        batch = pair.offered.pop(handover.number, None)
        if batch is None:
            return
        lengths = [span.stop for span in batch.spans]
        if handover.caches and [parts[0].shape[2] for parts in handover.caches] != lengths:
            self._lose(pair, EngineError("it handed over other prompts than it was offered"))
            return
        if handover.hidden is not None and not self._is_ours(handover.hidden):
            self._lose(pair, EngineError("it handed over hidden states of another size or type than this model's"))
            return
        alive = batch.alive
        if not alive:
            return
        rows: list[int] = []
        row = 0
        for index, (sequence, _, stop) in enumerate(batch.spans):
            if sequence.blocks is batch.tables[index]:
                rows += range(row, row + stop)
                if handover.caches:
                    read_in(self._cache, sequence, handover.caches[index])
            row += stop
        hidden = handover.hidden if handover.hidden is None or len(rows) == row else handover.hidden[rows]
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

    def _lose(self, pair: _Pair, error: MedusaError) -> None:
        """Go on without a partner. The prompts that it was offered are still in the scheduler."""
        if pair in self._pairs:
            logger.warning("a partner is lost: %s; going on without it", error)
            self._timeline.mark("unpaired", reason=str(error))
            self._remove_pair(pair)

    def _release_pair(self, pair: _Pair) -> None:
        """Release a partner that has handed over everything. From here on both are instances."""
        try:
            pair.channel.send(json_message(Kind.RELEASE, self.plan.number, {"as": "instance"}))
            pair.channel.flush(1.0)
        except MedusaError:
            pass
        self._timeline.mark("unpaired", reason="both are instances")
        self._remove_pair(pair)

    def _remove_pair(self, pair: _Pair) -> None:
        self._pairs.remove(pair)
        self._free_slots.release()
        pair.heartbeats.close()
        pair.channel.close()


def _is_whole_prompt(span: Span) -> bool:
    sequence: Sequence = span.sequence
    return span.start == 0 and span.stop == len(sequence.tokens) and span.stop > 1


__all__ = ["SourceEngine"]
