"""A worker that is not the leader. It runs its layers for the leader's steps, until the group is dissolved."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from medusa_runtime.config import Settings
from medusa_runtime.engine.base import GenerateRequest
from medusa_runtime.engine.gpu.device import Gpu
from medusa_runtime.engine.serving.requests import Sink
from medusa_runtime.engine.torch.engine import step_error
from medusa_runtime.errors import DeviceError, EngineError, MedusaError, OverloadedError
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

from .gathering import send_blocks
from .membership import GroupLostError, Member, check_leader, outcome_of, serve_group
from .plan import GroupPlan
from .steps import StepReader, ending_spans, forbid, has_prompts, tokens_body
from .wire.channel import ConnectionBrokenError, Greeting, TcpChannel, close_with, error_of
from .wire.message import Kind, Message, hidden_states, json_message
from .worker_engine import WorkerEngine

logger = logging.getLogger(__name__)

_POLL_S = 0.2
# How long to wait for the leader's message: when a neighbour has gone, which may have got it first, or when the leader
# seems to be silent because this process has stood still.
_GRACE_S = 1.0


class Follower(WorkerEngine):
    """The engine of a rank above 0; see the module. ``run`` serves the group, and later requests as an instance."""

    def __init__(
        self, region: Region, settings: Settings, timeline: Timeline, plan: GroupPlan, gpu: Gpu | None = None
    ) -> None:
        self.released: str | None = None  # "end" or "instance"
        self._instance = threading.Event()
        super().__init__(region, settings, timeline, plan, gpu)

    def add(self, request: GenerateRequest, sink: Sink) -> None:
        if not self._instance.is_set():
            raise OverloadedError("this worker holds a part of its model; expected the request at its group's leader")
        super().add(request, sink)

    def wait_ready(self) -> None:
        """Wait until this worker is an instance with all layers."""
        super().wait_ready()
        self._instance.wait()
        self.full.wait()
        self._check_loaded()

    @property
    def _needs_rest(self) -> bool:
        return self._instance.is_set()

    def run(self, stop: threading.Event) -> None:
        self.runner.prepare(eagerly=True)
        self.released = serve_group(lambda: _Session(self, stop.is_set), self.plan, stop)
        if self.released == "instance" and not stop.is_set():
            self._throttle.release()
            self.load_rest_now()
            self._instance.set()
            super().run(stop)
        elif not self.plan.exit:
            stop.wait()


class _Session:
    """One membership, from the greeting to the end of the connection to the leader."""

    def __init__(self, follower: Follower, stopped: Callable[[], bool]) -> None:
        self._follower = follower
        self._plan = follower.plan
        self._stopped = stopped
        self._number = follower.plan.number
        self._steps: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._hidden: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._reader = StepReader(follower.info.eos_token_ids)
        self._next: TcpChannel | None = None
        self._outcome: str | None = None  # once the leader has dissolved the group; steps under way have no results
        self._leader_done = threading.Event()  # set when the leader has dissolved the group, or has gone
        self.joined = False
        self._member = Member(
            self._plan, follower._timeline, follower.link, stopped=stopped, accept=self._accept,
            throttle=follower._throttle,
        )  # fmt: skip

    @torch.inference_mode()
    def run(self, deadline: float) -> str:
        try:
            leader = self._member.join(deadline, self._follower.identity(), self._state)
        except EngineError as error:
            raise GroupLostError(str(error)) from None
        threading.Thread(target=self._read_leader, args=(leader,), name="group-steps", daemon=True).start()
        try:
            return self._serve(leader)
        except (GroupLostError, ConnectionBrokenError) as error:
            self._leader_done.wait(_GRACE_S)
            if self._outcome is None:
                raise GroupLostError(str(error)) from None
            return self._outcome
        except Exception as error:
            failure = step_error(error)
            close_with(leader, self._number, failure)
            if isinstance(failure, DeviceError):  # such as a full GPU, of which the message says everything
                raise failure from error
            raise

    def _serve(self, leader: TcpChannel) -> str:
        while True:
            message = self._take(self._steps, leader)
            if message is None:  # this process has to stop, or a neighbour went before the leader's message was taken
                return self._outcome or "end"
            if message.kind is Kind.FORM:
                self._form(message)
            elif message.kind is Kind.STEP:
                self._step(message, leader)
            elif message.kind is Kind.RELEASE and self._outcome is not None:
                self._member.send_timeline()
                leader.flush(1.0)
                return self._outcome
            elif message.kind is Kind.ERROR:
                raise error_of(message)

    def _form(self, message: Message) -> None:
        values = message.values()
        self.joined = True
        if values.get("next") is not None:
            try:
                self._next = self._member.connect_next(str(values["next"]), self._leader_done.is_set)
            except EngineError:
                if self._leader_done.is_set():  # such as when the next worker was released first
                    return
                raise
            threading.Thread(target=self._watch_next, args=(self._next,), name="group-next", daemon=True).start()

    def _step(self, message: Message, leader: TcpChannel) -> None:
        """Run this worker's layers for a step. Send the hidden states to the next worker, or tokens to the leader."""
        follower, values = self._follower, message.values()
        spans = self._reader.read(values)
        follower._throttle.note_step(prompts=has_prompts(spans))
        incoming = None if self._outcome is not None else self._take(self._hidden, leader)
        if incoming is None:
            return
        if incoming.step != message.step:
            raise EngineError(f"expected the hidden states of step {message.step}, found those of {incoming.step}")
        began = time.monotonic_ns()
        layers = follower.layers
        forward = follower.runner.forward(spans, incoming.tensor())
        forward.run_layers(layers.start, layers.stop)
        if not layers.is_last:
            if self._next is None:
                raise EngineError("a step came before the group was formed")
            self._next.send(hidden_states(self._number, message.step, self._plan.rank, forward.hidden()))
        else:
            forward.score_prompts()
            ends = ending_spans(values, spans)
            sampled = []
            if ends:
                logits = forward.logits(ends)
                forbid(logits, values, ends)
                sampled = follower.runner.sample(logits, [spans[place].sequence for place in ends])
            tokens = tokens_body(sampled, spans)
            leader.send(json_message(Kind.TOKENS, self._number, tokens, step=message.step, rank=self._plan.rank))
        if not self._member.stages_sent:  # here, because on a GPU the layers have run only once their result is read
            follower._timeline.record("first_forward", began, time.monotonic_ns())
            self._member.send_timeline()

    def _take(self, messages: queue.SimpleQueue[Message | None], leader: TcpChannel) -> Message | None:
        """Return the next message, or None if this process has to stop or the group is dissolved.

        Raises GroupLostError if the leader is lost.
        """
        while not self._stopped():
            try:
                message = messages.get(timeout=_POLL_S)
            except queue.Empty:
                self._follower._check_loaded()
                check_leader(leader, self._plan)
                continue
            if message is None and self._outcome is None:
                raise GroupLostError("the connection to the group broke")
            return message
        return None

    def _read_leader(self, leader: TcpChannel) -> None:
        try:
            while (message := leader.receive()) is not None:
                if message.kind is Kind.HEARTBEAT:
                    self._member.note_heartbeat(message)
                    continue
                if message.kind is Kind.RELEASE:
                    self._outcome = outcome_of(message, self._plan)
                self._steps.put(message)
                if message.kind is Kind.RELEASE:
                    self._leader_done.set()
                    self._hidden.put(None)
        except (MedusaError, OverflowError, TypeError, ValueError) as error:
            logger.warning("the leader sent something that is no message: %s", error)
        self._leader_done.set()
        self._steps.put(None)
        self._hidden.put(None)

    def _accept(self, greeting: Greeting) -> None:
        if greeting.purpose == "hidden":
            threading.Thread(
                target=self._read_hidden, args=(greeting.channel,), name="group-hidden", daemon=True
            ).start()
        elif greeting.purpose == "blocks":
            follower = self._follower
            arguments = (follower._cache, follower.layers, greeting.channel, self._number, self._plan.rank)
            threading.Thread(target=send_blocks, args=arguments, name="group-blocks", daemon=True).start()
        else:
            greeting.channel.close()

    def _read_hidden(self, channel: TcpChannel) -> None:
        try:
            while (message := channel.receive()) is not None:
                self._hidden.put(message)
        except MedusaError as error:
            logger.warning("the worker before this one sent something that is no message: %s", error)
        self._on_neighbour_lost()

    def _watch_next(self, channel: TcpChannel) -> None:
        """Wait until the connection to the next worker ends. No messages come from there."""
        try:
            while channel.receive() is not None:
                pass
        except MedusaError:
            pass
        self._on_neighbour_lost()

    def _on_neighbour_lost(self) -> None:
        """Give up because the connection to a neighbour has ended, so that the leader takes care of the requests.

        Waits a moment first: when a group is dissolved, a neighbour may go before the leader's message arrives here.
        """
        self._leader_done.wait(_GRACE_S)
        self._hidden.put(None)
        self._steps.put(None)

    def _state(self) -> dict[str, Any]:
        return {"loaded": self._follower.loaded, "full": self._follower.full.is_set()}

    def close(self) -> None:
        self._member.close()


__all__ = ["Follower"]
