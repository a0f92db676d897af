"""A rank of vLLM's pipeline: a worker of vLLM that runs the steps of the leader's scheduler.

It begins to load its layers at once, while the group forms. It has no scheduler and no text. Rank 0 is a fork of the
leader's engine process, which has imported vLLM.
"""

from __future__ import annotations

import copy
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from medusa_runtime.errors import EngineError, MedusaError
from medusa_runtime.process import die_with_parent, name_process
from medusa_runtime.timeline import Timeline
from medusa_vllm.cpu.ranks import drop_sockets
from medusa_vllm.executor import PreparedWorker, join_group_of_one
from medusa_vllm.version import MISSING_PART_ERRORS
from vllm.config import set_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.outputs import AsyncModelRunnerOutput

from ..fetch_throttle import FetchThrottle
from ..membership import GroupLostError, Member, check_leader, outcome_of
from ..plan import GroupPlan
from ..wire.channel import ConnectionBrokenError, Greeting, TcpChannel, close_with, error_of
from ..wire.emulated_link import EmulatedLink
from ..wire.message import Kind, Message
from .calls import deserialize, serialize
from .configuration import RankConfig, partition
from .pipe import Pipe

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ANSWERED_BY_THE_LAST = ("execute_model", "sample_tokens")


class Rank:
    """One membership in a group, from the greeting to the end. Call ``run`` in one thread.

    ``throttle`` learns of each step, and whether all of the group's layers are loaded.
    """

    def __init__(
        self,
        rank_config: RankConfig,
        plan: GroupPlan,
        link: EmulatedLink | None,
        timeline: Timeline,
        stopped: Callable[[], bool],
        throttle: FetchThrottle | None = None,
    ) -> None:
        self._rank_config, self._plan, self._timeline = rank_config, plan, timeline
        self._stopped, self._throttle = stopped, throttle
        self._number = plan.number
        self._messages: queue.SimpleQueue[Message | MedusaError] = queue.SimpleQueue()
        self._lost: str | None = None
        self._outcome: str | None = None  # ``end`` or ``instance``, once the leader has dissolved the group
        self._incoming: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._pipe_made: Future[Pipe] = Future()
        self._worker: Any = None
        self.loaded = False
        self.joined = False
        self._member = Member(plan, timeline, link, stopped=stopped, accept=self._accept, throttle=throttle)

    def run(self, deadline: float) -> str:
        """Serve until the group is dissolved, and return what this worker becomes: ``end`` or ``instance``.

        ``deadline`` is when it must have joined (time.monotonic). Raises GroupLostError if the group is lost, and
        EngineError if this rank cannot take part.
        """
        threading.Thread(target=self._join, args=(deadline,), name="group-join", daemon=True).start()
        try:
            with partition(self._rank_config.layers, self._plan):
                return self._serve()
        except GroupLostError:
            if self._outcome is None:
                raise
            return self._outcome  # the group was dissolved during a step, whose hidden states will never come
        except ConnectionBrokenError as error:
            time.sleep(_POLL_S)  # the leader's message may come a moment later
            if self._outcome is None:
                raise GroupLostError(str(error)) from None
            return self._outcome
        except MISSING_PART_ERRORS as error:
            raise EngineError(f"this version of vLLM cannot be a worker of a group: {error}") from error
        except MedusaError as error:
            if self._member.leader is not None:
                close_with(self._member.leader, self._number, error)
            raise

    def _serve(self) -> str:
        pipe = self._load()
        while not self._stopped():
            try:
                message = self._messages.get(timeout=_POLL_S)
            except queue.Empty:
                self._check()
                continue
            if isinstance(message, MedusaError):
                raise message
            if message.kind is Kind.CALL:
                self._call(message, pipe)
            elif message.kind is Kind.RELEASE and self._outcome is not None:
                self._send_timeline()
                return self._outcome
        return "end"

    def _load(self) -> Pipe:
        """Make vLLM's worker, and load this rank's layers as their bytes arrive."""
        config, plan = (
            copy.deepcopy(self._rank_config.config),
            self._plan,
        )  # a copy, because vLLM notes a model's layers in it
        worker = self._worker = PreparedWorker(rpc_rank=0, global_rank=plan.rank)
        own = {"local_rank": 0, "rank": plan.rank, "distributed_init_method": "env://", "is_driver_worker": True}
        worker.init_worker([{"vllm_config": config, **own}])
        join_group_of_one(config)
        pipe = Pipe(plan.rank, plan.size, self._number, self._incoming, self._check)
        pipe.install()
        self._pipe_made.set_result(pipe)
        worker.init_device()
        worker.load_model()
        current_platform.update_block_size_for_backend(config)
        if plan.rank:  # vLLM makes them in its warm-up, which is skipped when eager on a CPU
            runner = worker.worker.model_runner
            with set_current_vllm_config(config):
                runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
                    batch_size=runner.max_num_tokens, dtype=config.model_config.dtype, device=runner.device
                )
        self.loaded = True
        return pipe

    def _call(self, message: Message, pipe: Pipe) -> None:
        """Run a method of vLLM's worker, and send the result."""
        assert self._member.leader is not None
        method, args, kwargs = deserialize(message.body)
        if not isinstance(method, str) or method.startswith("_"):
            raise EngineError(f"expected the name of a worker's method from the leader, found {method!r}")
        if method == "execute_model" and self._throttle is not None:
            self._throttle.note_step(prompts=args[0].total_num_scheduled_tokens > len(args[0].num_scheduled_tokens))
        began = time.monotonic_ns()
        result = getattr(self._worker, method)(*args, **kwargs)
        if isinstance(result, AsyncModelRunnerOutput):
            result = result.get_output()
        if method not in _ANSWERED_BY_THE_LAST or pipe.is_last_rank:
            answer = Message(Kind.RESULT, self._number, message.step, self._plan.rank, body=serialize(result))
            self._member.leader.send(answer)
        if method == "execute_model" and not self._member.stages_sent:
            self._timeline.record("first_forward", began, time.monotonic_ns())
            self._send_timeline()

    def _check(self) -> None:
        """Raise GroupLostError if the group is lost or dissolved."""
        if self._outcome is not None or self._stopped():
            raise GroupLostError("the group was dissolved during a step")
        if self._lost is not None:
            raise GroupLostError(self._lost)
        if self._member.leader is not None:
            check_leader(self._member.leader, self._plan)

    # The threads of the connections.

    def _join(self, deadline: float) -> None:
        try:
            leader = self._member.join(deadline, self._rank_config.identity, self._state)
        except EngineError as error:
            self._lost = str(error)
            return
        try:
            while (message := leader.receive()) is not None:
                if message.kind is Kind.HEARTBEAT:
                    self._member.note_heartbeat(message)
                elif message.kind is Kind.FORM:
                    self.joined = True
                    threading.Thread(target=self._form, args=(message,), name="group-form", daemon=True).start()
                elif message.kind is Kind.ERROR:
                    self._messages.put(error_of(message))
                else:
                    if message.kind is Kind.RELEASE:
                        self._outcome = outcome_of(message, self._plan)
                    self._messages.put(message)
        except (MedusaError, TypeError, ValueError) as error:
            logger.warning("the leader sent something that is no message: %s", error)
        self._lost = self._lost or "the connection to the group broke"

    def _form(self, message: Message) -> None:
        """Connect to the next worker. Runs in a thread of its own, since the leader may end the group meanwhile."""
        try:
            following = message.values().get("next")
            pipe = self._pipe_made.result()
            if following is not None:
                pipe.next_channel = self._member.connect_next(str(following), lambda: self._outcome is not None)
                threading.Thread(target=self._watch, args=(pipe.next_channel,), name="group-next", daemon=True).start()
        except EngineError as error:
            self._lost = self._lost or str(error)
            return
        pipe.formed.set()

    def _accept(self, greeting: Greeting) -> None:
        if greeting.purpose == "hidden" and greeting.rank == self._plan.rank - 1:
            threading.Thread(target=self._watch, args=(greeting.channel,), name="group-hidden", daemon=True).start()
        else:
            greeting.channel.close()

    def _watch(self, channel: TcpChannel) -> None:
        """Take a neighbour's tensors until the connection ends. The next rank sends none."""
        try:
            while (message := channel.receive()) is not None:
                if message.kind is Kind.TENSORS:
                    self._incoming.put(message)
        except MedusaError as error:
            logger.warning("a neighbour in the group sent something that is no message: %s", error)
        time.sleep(_POLL_S)  # the leader's message may come a moment later
        self._lost = self._lost or "the connection to a neighbour in the group broke"

    def _state(self) -> dict[str, Any]:
        return {"loaded": self.loaded}

    def _send_timeline(self) -> None:
        """Send the leader the stages of this process that it does not have yet. Rank 0 shares the leader's timeline."""
        if self._plan.rank == 0 or self._member.leader is None:
            self._member.stages_sent = 1
            return
        self._member.send_timeline()
        self._member.leader.flush(1.0)

    def close(self) -> None:
        """Leave the group, and free the worker's memory."""
        self._member.close()
        if self._pipe_made.done():
            self._pipe_made.result().remove()
        self._worker = None


def fork_rank_zero(rank_config: RankConfig, plan: GroupPlan, link: EmulatedLink | None, timeline: Timeline) -> int:
    """Fork rank 0, which serves until the group is dissolved, and return its process id.

    The kernel kills it when the calling thread ends.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        die_with_parent(parent)
        name_process("group-rank-0")
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        drop_sockets()
        _serve(rank_config, plan, link, timeline.named("rank 0"))
        status = 0
    except Exception:
        logger.exception("rank 0 of the group failed")
    finally:
        os._exit(status)  # never run the parent's exit handlers


def _serve(rank_config: RankConfig, plan: GroupPlan, link: EmulatedLink | None, timeline: Timeline) -> None:
    rank = Rank(rank_config, plan, link, timeline, lambda: False)
    rank.run(time.monotonic() + plan.form_s)


__all__ = ["Rank", "fork_rank_zero"]
