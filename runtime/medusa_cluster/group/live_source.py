"""The overloaded side of a live pair: an instance that lets a new one run the first layers of its prefills."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Any

from medusa_runtime.config import Settings
from medusa_runtime.engine.serving.sequence import Sequence, Span
from medusa_runtime.engine.torch.engine import TorchEngine
from medusa_runtime.engine.torch.paged_attention import PagedAttention
from medusa_runtime.engine.torch.runner import positions_of, rows_of, tokens_of
from medusa_runtime.errors import EngineError, MedusaError
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

from .channel import Greeting, Listener, TcpChannel, error_of
from .identity import Beats, disagreement, identity_of
from .link import Link
from .live import Batch, Handover, HandoverReader, grouped, offer, read_in
from .message import Kind, Message, packed
from .plan import GroupPlan

logger = logging.getLogger(__name__)


class _Pair:
    """The target that helps, and what it has of ours."""

    def __init__(self, channel: TcpChannel) -> None:
        self.channel = channel
        self.offered: dict[int, Batch] = {}
        self.arrived: deque[Handover] = deque()
        self.pulled = False  # a pull has not been answered yet
        self.full = False  # it has all layers: it gets nothing more


class Source(TorchEngine):
    """An instance that listens for new ones. Alone it is a torch engine like any other."""

    def __init__(self, region: Region, settings: Settings, timeline: Timeline, plan: GroupPlan) -> None:
        self.plan = plan
        self._pair: _Pair | None = None
        self._beats: Beats | None = None
        self._next_batch = 1
        self.helped = 0  # layers of batches that targets have run
        super().__init__(region, settings, timeline)
        host, port = plan.leader_place
        link = Link(plan.link_bytes_per_s) if plan.link_bytes_per_s else None
        self._pair_listener = Listener(host, port, group=plan.number, token=plan.token, accept=self._accept, link=link)

    def stats(self) -> dict[str, Any]:
        pair = self._pair
        waiting = 0 if pair is None else len(pair.offered)
        return super().stats() | {"paired": pair is not None, "offered": waiting, "layers_helped": self.helped}

    def close(self) -> None:
        self._pair_listener.close()
        pair = self._pair
        if pair is not None:
            pair.channel.close()
        if self._beats is not None:
            self._beats.close()
        super().close()

    def _accept(self, greeting: Greeting) -> None:
        """In the listener's thread: a new instance offers its help."""
        ours = identity_of(self._region, self._model.config, self._dtype, size=self.plan.size)
        reason = disagreement(ours, greeting.values)
        if greeting.purpose != "live" or self._pair is not None:
            reason = "this instance has a partner already"
        if reason is not None:
            error = EngineError(f"live scaling was refused: {reason}")
            logger.warning("%s", error)
            greeting.channel.send(packed(Kind.ERROR, self.plan.number, {"code": error.code, "message": str(error)}))
            greeting.channel.flush(1.0)
            greeting.channel.close()
            return
        pair = _Pair(greeting.channel)
        self._inbox.post(lambda: self._begin_pair(pair))

    def _begin_pair(self, pair: _Pair) -> None:
        if self._pair is not None:
            pair.channel.close()
            return
        self._pair = pair
        self._timeline.mark("paired")
        self._beats = Beats(self.plan.number, 0, pair.channel.send, dict)
        threading.Thread(target=self._listen, args=(pair,), name="live-target", daemon=True).start()

    def _listen(self, pair: _Pair) -> None:
        error: MedusaError = EngineError("its connection broke")
        reader = HandoverReader()
        try:
            while (message := pair.channel.receive()) is not None:
                if message.kind is Kind.BEAT:
                    pair.full = bool(message.values().get("full"))
                elif message.kind is Kind.ERROR:
                    raise error_of(message)
                elif (handover := reader.take(message, self._cache)) is not None:
                    self._inbox.post(lambda handover=handover: self._take(pair, handover))  # type: ignore[misc]
        except MedusaError as found:
            error = found
        except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as found:
            error = EngineError(f"it sent something that could not be read: {found!r}")
        self._inbox.post(lambda: self._lose(pair, error))

    # From here on: the thread of run.

    def _turn(self) -> bool:
        pair = self._pair
        if pair is None:
            return super()._turn()
        if time.monotonic() - pair.channel.heard > self.plan.silent_s:
            self._lose(pair, EngineError(f"it has been silent for {self.plan.silent_s:g} s"))
            return True
        worked = bool(pair.arrived)
        if pair.arrived:
            self._finish(pair, pair.arrived.popleft())
        busy = {span.sequence for batch in pair.offered.values() for span in batch.spans}
        busy |= {span.sequence for handover in pair.arrived for span in self._spans(pair, handover)}
        spans = self._scheduler.schedule(busy)
        whole = [] if pair.full else [span for span in spans if _is_whole_prompt(span)]
        ours = [span for span in spans if span not in whole]
        try:
            for group in grouped(whole):
                self._offer(pair, group)
            if ours:
                self._step(ours)
            if pair.offered and not pair.pulled and not pair.arrived:
                pair.pulled = True
                pair.channel.send(Message(Kind.PULL, self.plan.number))
            elif pair.full and not pair.offered and not pair.arrived:
                self._part_with(pair)
        except EngineError as error:
            self._lose(pair, error)
        return worked or bool(spans)

    def _spans(self, pair: _Pair, handover: Handover) -> list[Span]:
        batch = pair.offered.get(handover.number)
        return [] if batch is None else batch.spans

    def _offer(self, pair: _Pair, spans: list[Span]) -> None:
        number, self._next_batch = self._next_batch, self._next_batch + 1
        batch = Batch(number, spans, [span.sequence.blocks for span in spans], time.monotonic_ns())
        pair.offered[number] = batch
        pair.channel.send(offer(self.plan.number, batch))

    def _take(self, pair: _Pair, handover: Handover) -> None:
        if pair is self._pair:
            pair.pulled = False
            pair.arrived.append(handover)

    def _finish(self, pair: _Pair, handover: Handover) -> None:
        """Run the layers of a batch that the target has not run, and sample."""
        batch = pair.offered.pop(handover.number, None)
        if batch is None:
            return
        alive = batch.alive
        if not alive:
            return
        rows: list[int] = []
        row = 0
        for place, (sequence, _, stop) in enumerate(batch.spans):
            if sequence.blocks is batch.tables[place]:
                rows += range(row, row + stop)
                if handover.caches:
                    read_in(self._cache, sequence, handover.caches[place])
            row += stop
        attention, places = PagedAttention(self._cache, alive), positions_of(alive)
        if handover.hidden is None:
            hidden = self._model.embed(tokens_of(alive), places)
        else:
            hidden = handover.hidden if len(rows) == row else handover.hidden[rows]
        hidden = self._model.run_layers(hidden, places, attention, handover.done)
        for sequence, _, stop in alive:
            sequence.computed = stop
        self.helped += handover.done
        ends = [place for place, span in enumerate(alive) if span.stop == len(span.sequence.tokens)]
        sequences = [alive[place].sequence for place in ends]
        sampled = self._sample(self._model.logits(rows_of(hidden, alive, ends)), sequences) if ends else []
        self._give(alive, sequences, sampled, batch.began_ns)

    def _lose(self, pair: _Pair, error: MedusaError) -> None:
        """Go on alone: the scheduler finds all that was offered where it was before."""
        if pair is self._pair:
            logger.warning("the new instance is lost: %s; going on alone", error)
            self._timeline.mark("unpaired", reason=str(error))
            self._end_pair(pair)

    def _part_with(self, pair: _Pair) -> None:
        """The target has all layers and nothing of ours: from here on both are instances."""
        try:
            pair.channel.send(packed(Kind.RELEASE, self.plan.number, {"as": "instance"}))
            pair.channel.flush(1.0)
        except MedusaError:
            pass
        self._timeline.mark("unpaired", reason="the new instance has all layers")
        self._end_pair(pair)

    def _end_pair(self, pair: _Pair) -> None:
        self._pair = None
        if self._beats is not None:
            self._beats.close()
        pair.channel.close()


def _is_whole_prompt(span: Span) -> bool:
    sequence: Sequence = span.sequence
    return span.start == 0 and span.stop == len(sequence.tokens) and span.stop > 1


__all__ = ["Source"]
