"""The workers of a group as their leader sees them, from its forming to its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from medusa_runtime.errors import EngineError, MedusaError
from medusa_runtime.timeline import Timeline

from .forming import Worker
from .identity import Heartbeats
from .plan import GroupPlan
from .wire.channel import TcpChannel, error_of
from .wire.message import Kind, Message, json_message

_FLUSH_S = 10.0  # for the last messages to a worker that stands still, as long as TCP waits for it
_REASON_S = 0.5  # the time for a worker's reason, which comes over another channel than the one that has closed
_LAST_STAGES_S = 0.2  # the time for the last stages of the workers' timelines to arrive


class WorkerConnections:
    """The connections to all workers. Threads listen to them, and notice when a worker is lost.

    ``on_message`` gets a worker's messages, except its heartbeats and its timeline. ``on_lost`` gets a worker that is
    lost, and the reason, perhaps more than once. ``all_loaded`` returns whether all of the group's layers are loaded;
    it is called for each of the leader's own heartbeats. All three are called in the threads of the connections.
    """

    def __init__(
        self,
        workers: list[Worker],
        plan: GroupPlan,
        timeline: Timeline,
        *,
        on_message: Callable[[Worker, Message], None],
        on_lost: Callable[[Worker, MedusaError], None],
        all_loaded: Callable[[], bool],
    ) -> None:
        self.workers = workers
        self._plan, self._timeline = plan, timeline
        self._on_message, self._on_lost = on_message, on_lost
        for worker in workers:
            ended = threading.Event()
            self._start_listening(worker, worker.channel, ended)
            if worker.hidden_channel is not None:  # to notice when it closes; there are no messages
                self._start_listening(worker, worker.hidden_channel, ended)
        self._heartbeats = Heartbeats(plan.number, 0, self._send_heartbeat, lambda: {"served": all_loaded()})

    @property
    def loaded(self) -> bool:
        """Whether every worker has its layers."""
        return all(worker.loaded for worker in self.workers)

    def send(self, message: Message) -> None:
        """Send a message to all workers. Raises EngineError if a connection is broken."""
        for worker in self.workers:
            worker.channel.send(message)

    def release(self, keep: int) -> None:
        """Dissolve the group: the first ``keep`` workers become instances, the leader among them; the others end."""
        self._heartbeats.close()
        for worker in self.workers:
            become = "instance" if 0 < worker.rank < keep else "end"
            with suppress(MedusaError):
                worker.channel.send(json_message(Kind.RELEASE, self._plan.number, {"as": become}))
        threading.Thread(target=self._close_when_sent, name="group-release", daemon=True).start()

    def _close_when_sent(self) -> None:
        """Wait until the last messages are sent, then close all connections."""
        for worker in self.workers:
            worker.channel.flush(_FLUSH_S)
        time.sleep(_LAST_STAGES_S)
        for worker in self.workers:
            worker.close()

    def _send_heartbeat(self, message: Message) -> None:
        for worker in self.workers:
            if time.monotonic() - worker.channel.last_received_at > self._plan.silent_s:
                self._on_lost(worker, EngineError(f"it has been silent for {self._plan.silent_s:g} s"))
            with suppress(MedusaError):  # the channel's reader reports a broken connection
                worker.channel.send(message)

    def _start_listening(self, worker: Worker, channel: TcpChannel, ended: threading.Event) -> None:
        threading.Thread(target=self._listen, args=(worker, channel, ended), name="group-worker", daemon=True).start()

    def _listen(self, worker: Worker, channel: TcpChannel, ended: threading.Event) -> None:
        """Listen to a worker until the channel closes. ``ended`` is set when its channel for steps has closed."""
        error: MedusaError = EngineError("its connection broke")
        try:
            while (message := channel.receive()) is not None:
                if message.kind is Kind.HEARTBEAT:
                    worker.note_heartbeat(message.values())
                elif message.kind is Kind.STAGES:
                    self._add_stages(worker, message)
                elif message.kind is Kind.ERROR:
                    raise error_of(message)
                else:
                    self._on_message(worker, message)
        except MedusaError as found:
            error = found
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as found:
            error = EngineError(f"it sent something that could not be read: {found!r}")
        if channel is not worker.channel:
            ended.wait(_REASON_S)
        self._on_lost(worker, error)
        if channel is worker.channel:
            ended.set()

    def _add_stages(self, worker: Worker, message: Message) -> None:
        """Add a worker's stages to the leader's timeline, converted to the leader's clock."""
        timeline, shift = self._timeline.named(f"worker {worker.rank}"), worker.offset_ns
        for name, process, start_ns, end_ns, detail in message.values()["stages"]:
            timeline.record(str(name), int(start_ns) + shift, int(end_ns) + shift, of=str(process), detail=detail)


__all__ = ["WorkerConnections"]
