"""The target: an instance that runs another one's prefills, with the layers it has so far, or as its only work."""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import Any

import torch
from medusa_runtime.config import Settings
from medusa_runtime.engine.base import GenerateRequest, SamplingParams
from medusa_runtime.engine.gpu.device import Gpu, is_full
from medusa_runtime.engine.serving.requests import Sink
from medusa_runtime.engine.serving.sequence import Sequence, Span
from medusa_runtime.engine.serving.transcript import Transcript
from medusa_runtime.engine.torch.engine import step_error
from medusa_runtime.engine.torch.kv_cache import blocks_for
from medusa_runtime.engine.torch.runner import Forward
from medusa_runtime.errors import EngineError, MedusaError, OverloadedError
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline
from torch import Tensor

from ..identity import Heartbeats, identity_of
from ..plan import GroupPlan, PlanFile
from ..wire.channel import TcpChannel, connect, error_of
from ..wire.message import Kind, Message
from .handover import offered, read_out, send_cache, send_handover
from .layer_queue import layer_queue
from .source import SourceEngine

logger = logging.getLogger(__name__)

_ARRIVAL_S = 0.005  # between two checks of an idle target for a newly arrived layer


class TargetEngine(SourceEngine):
    """The target's engine. It helps its source until the source releases it, and is an instance after that.

    If its plan says where to ``listen``, others can help that instance.
    """

    def __init__(
        self, region: Region, settings: Settings, timeline: Timeline, plan: GroupPlan, gpu: Gpu | None = None
    ) -> None:
        self._instance = threading.Event()
        super().__init__(region, settings, timeline, plan, gpu)

    def _takes_requests(self) -> bool:
        return self._instance.is_set()

    def add(self, request: GenerateRequest, sink: Sink) -> None:
        if not self._instance.is_set():
            raise OverloadedError("this instance works for another one; expected the request there")
        super().add(request, sink)

    def wait_ready(self) -> None:
        super().wait_ready()
        self._instance.wait()
        self._check_loaded()

    def stats(self) -> dict[str, Any]:
        return super().stats() | {"layers_loaded": self.loaded_layers()}

    def run(self, stop: threading.Event) -> None:
        self.runner.prepare()
        helper = _Helper(self)
        try:
            with torch.inference_mode():
                helper.run(stop)
        except (EngineError, RuntimeError) as error:
            if not isinstance(error, EngineError) and not is_full(error):
                raise
            logger.warning("%s; this instance goes on alone", step_error(error))
        finally:
            helper.close()
        self._timeline.mark("released")
        self._instance.set()
        super().run(stop)

    def loaded_layers(self) -> int:
        """Return how many layers, from the first one on, could run now."""
        if not all(self._loader.is_loaded(unit) for unit in self._model.embedding_modules):
            return 0
        total = self.layers.total
        return next((number for number in range(total) if not self._loader.is_loaded(f"layers.{number}")), total)


class _Prefill:
    """A batch under way: its prompts, in the target's own blocks, and its forward pass through the layers so far.

    ``done`` layers have run elsewhere, with the result ``hidden``.
    """

    def __init__(self, number: int, prompts: list[list[int]], done: int) -> None:
        self.number = number  # the source's number of the batch
        self.done = done
        self.hidden: Tensor | None = None
        self.spans = [Span(_sequence(prompt), 0, len(prompt)) for prompt in prompts]
        self.forward: Forward | None = None
        self.parts: list[int] = []  # for each sending of keys and values, the number of layers


class _Helper:
    """The target's work for its source."""

    def __init__(self, target: TargetEngine) -> None:
        self._target = target
        self._plan = target.plan
        self._queue = layer_queue(target.plan.queue, target.layers.total)
        self._prefills: dict[int, _Prefill] = {}  # by the queue's number of the batch
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._announced: _Prefill | None = None  # its hidden states come next
        self._pull = False
        self._channel: TcpChannel | None = None
        self._heartbeats: Heartbeats | None = None
        path = target._settings.group
        self._file = PlanFile(path, target.plan) if path is not None else None
        self._prefilling = False  # with all layers

    def run(self, stop: threading.Event) -> None:
        """Work until the source releases this target. Raises EngineError if the source is lost."""
        target, plan = self._target, self._plan
        if self._is_released():
            return  # an engine before this one has been: its source may be gone, and need not be waited for
        link = plan.emulated_link()
        identity = identity_of(target._region, target._model.config, target._dtype, size=plan.size, gpu=target._gpu)
        channel = self._channel = connect(
            plan.leader, group=plan.number, access=plan.access, rank=plan.rank, purpose="live",
            deadline=time.monotonic() + plan.form_s, stopped=lambda: stop.is_set() or self._is_released(), link=link,
            **identity,
        )  # fmt: skip
        threading.Thread(target=self._read, args=(channel,), name="live-source", daemon=True).start()
        self._heartbeats = Heartbeats(plan.number, plan.rank, channel.send, self._state)
        idle = True
        while not stop.is_set() and self._handle(channel, idle=idle):
            target._check_loaded()
            loaded = target.loaded_layers()
            if self._pull:  # before the next layer, because the source is idle until it gets an answer
                self._hand_over(channel, loaded)
            batch = self._queue.next(loaded)
            idle = batch is None or not self._run_layer(batch)

    def _state(self) -> dict[str, Any]:
        """Return what the source is told of this target, a few times a second.

        ``loading``: it lacks layers. ``leaving``: it wants to be released. ``relieves``: while it loads, it runs first
        layers for others that prefill.
        """
        loaded = self._target._loader.applied
        if self._plan.mode == "live":
            return {"loading": not loaded, "leaving": loaded}
        if loaded and not self._prefilling:
            self._prefilling = True
            self._target._timeline.mark("prefilling")
        return {"loading": not loaded, "leaving": self._is_released(), "relieves": self._plan.relieves}

    def _is_released(self) -> bool:
        """Return whether the group's file says that this target shall be an instance."""
        return self._file is not None and self._file.reload().then == "up"

    def _handle(self, channel: TcpChannel, *, idle: bool) -> bool:
        """Handle the source's messages. Return False if it has released this target."""
        wait_s = _ARRIVAL_S if idle else 0.0
        while True:
            try:
                message = self._messages.get(timeout=wait_s) if wait_s else self._messages.get_nowait()
            except queue.Empty:
                if time.monotonic() - channel.last_received_at > self._plan.silent_s:
                    raise EngineError(f"the source has been silent for {self._plan.silent_s:g} s") from None
                return True
            wait_s = 0.0
            if message is None:
                raise EngineError("the connection to the source broke")
            if message.kind is Kind.OFFER:
                self._take_offer(message)
            elif message.kind is Kind.HIDDEN:
                self._take_hidden(message)
            elif message.kind is Kind.PULL:
                self._pull = True
            elif message.kind is Kind.ERROR:
                raise error_of(message)
            elif message.kind is Kind.RELEASE:
                return False

    def _take_offer(self, message: Message) -> None:
        prefill = _Prefill(message.step, *offered(message, self._target.layers.total))
        if prefill.done:
            self._announced = prefill
        else:
            self._prefills[self._queue.add()] = prefill

    def _take_hidden(self, message: Message) -> None:
        """Take the hidden states of a batch of which another instance has run the first layers."""
        prefill, self._announced = self._announced, None
        hidden, config = message.tensor(), self._target._model.config
        tokens = 0 if prefill is None else sum(span.stop for span in prefill.spans)
        if prefill is None or hidden.shape != (tokens, config.hidden_size) or hidden.dtype != self._target._dtype:
            raise EngineError("expected the hidden states of a batch that was offered before, found others")
        prefill.hidden = hidden
        self._prefills[self._queue.add(prefill.done)] = prefill

    def _run_layer(self, batch: int) -> bool:
        """Run the next layer of a batch. Return False if there is no room for its keys and values."""
        target, prefill = self._target, self._prefills[batch]
        if prefill.forward is None:
            needed = [blocks_for(span.stop) for span in prefill.spans]
            blocks = target._cache.blocks.allocate(sum(needed))
            if blocks is None:
                return False
            for span, count in zip(prefill.spans, needed, strict=True):
                span.sequence.blocks, blocks = blocks[:count], blocks[count:]
            prefill.forward = target.runner.forward(prefill.spans, prefill.hidden)
            prefill.hidden = None
        done = self._queue.done(batch)
        prefill.forward.run_layers(done, done + 1)
        self._queue.layer_done(batch)
        self._send_layers(prefill, done, done + 1)  # the source needs them, and they travel while the next layer runs
        return True

    def _send_layers(self, prefill: _Prefill, start: int, stop: int) -> None:
        assert self._channel is not None
        for span in prefill.spans:
            cache = read_out(self._target._cache, span.sequence.blocks, span.stop, start, stop)
            send_cache(self._channel, self._plan.number, prefill.number, cache)
        prefill.parts.append(stop - start)

    def _hand_over(self, channel: TcpChannel, loaded: int) -> None:
        batch = self._queue.pull(loaded)
        if batch is None:
            return
        self._pull = False
        prefill = self._prefills.pop(batch)
        lengths = [span.stop for span in prefill.spans]
        hidden = prefill.forward.hidden() if prefill.parts and prefill.forward is not None else None
        send_handover(channel, self._plan.number, prefill.number, prefill.parts, lengths, hidden)
        self._free(prefill)

    def _free(self, prefill: _Prefill) -> None:
        for span in prefill.spans:
            self._target._cache.blocks.release(span.sequence.blocks)
            span.sequence.blocks = []

    def _read(self, channel: TcpChannel) -> None:
        try:
            while (message := channel.receive()) is not None:
                if message.kind is not Kind.HEARTBEAT:
                    self._messages.put(message)
        except MedusaError as error:
            logger.warning("the source sent something that is no message: %s", error)
        self._messages.put(None)

    def close(self) -> None:
        if self._heartbeats is not None:
            self._heartbeats.close()
        if self._channel is not None:
            self._channel.close()
        for prefill in self._prefills.values():
            self._free(prefill)
        self._prefills.clear()


def _sequence(prompt: list[int]) -> Sequence:
    """Return a prompt in the form that attention takes. It will get no tokens here."""
    return Sequence(
        GenerateRequest("", (), SamplingParams()),
        prompt,
        lambda _: None,
        limit=0,
        eos_token_ids=frozenset(),
        transcript=Transcript(None, (), include_stop=False),
    )


__all__ = ["TargetEngine"]
