"""The workers of a group as their leader sees them, from its forming to its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress

from medusa_runtime.errors import EngineError, MedusaError
from medusa_runtime.timeline import Timeline

from .forming import Worker
from .identity import Beats
from .plan import GroupPlan
from .wire.channel import TcpChannel, error_of
from .wire.message import Kind, Message, packed

_FLUSH_S = 1.0
_LAST_STAGES_S = 0.2  # the time for the last stages of the workers' timelines to arrive


class Crew:
    """The connections to all workers. The crew listens to them, and notices when a worker is lost.

    ``take`` gets a worker's messages, except its signs of life and its timeline. ``lose`` gets a worker that is lost,
    and the reason, perhaps more than once. ``served`` returns whether all of the group's layers are loaded; it is
    called for each of the leader's own signs of life. All three are called in threads of the crew.
    """

    def __init__(
        self,
        workers: list[Worker],
        plan: GroupPlan,
        timeline: Timeline,
        *,
        take: Callable[[Worker, Message], None],
        lose: Callable[[Worker, MedusaError], None],
        served: Callable[[], bool],
    ) -> None:
        self.workers = workers
        self._plan, self._timeline = plan, timeline
        self._take, self._lose = take, lose
        for worker in workers:
            self._start_listening(worker, worker.channel)
            if worker.hidden is not None:
                self._start_listening(worker, worker.hidden)  # to notice when it closes; there are no messages
        self._beats = Beats(plan.number, 0, self._beat, lambda: {"served": served()})

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
        self._beats.close()
        for worker in self.workers:
            become = "instance" if 0 < worker.rank < keep else "end"
            with suppress(MedusaError):
                worker.channel.send(packed(Kind.RELEASE, self._plan.number, {"as": become}))
        threading.Thread(target=self._part, name="group-release", daemon=True).start()

    def _part(self) -> None:
        """Wait until the last messages are sent, then close all connections."""
        for worker in self.workers:
            worker.channel.flush(_FLUSH_S)
        time.sleep(_LAST_STAGES_S)
        for worker in self.workers:
            worker.close()

    def _beat(self, message: Message) -> None:
        for worker in self.workers:
            if time.monotonic() - worker.channel.heard > self._plan.silent_s:
                self._lose(worker, EngineError(f"it has been silent for {self._plan.silent_s:g} s"))
            with suppress(MedusaError):  # the channel's reader reports a broken connection
                worker.channel.send(message)

    def _start_listening(self, worker: Worker, channel: TcpChannel) -> None:
        threading.Thread(target=self._listen, args=(worker, channel), name="group-worker", daemon=True).start()

    def _listen(self, worker: Worker, channel: TcpChannel) -> None:
        error: MedusaError = EngineError("its connection broke")
        try:
            while (message := channel.receive()) is not None:
                if message.kind is Kind.BEAT:
                    worker.note_beat(message.values())
                elif message.kind is Kind.STAGES:
                    self._add_stages(worker, message)
                elif message.kind is Kind.ERROR:
                    raise error_of(message)
                else:
                    self._take(worker, message)
        except MedusaError as found:
            error = found
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as found:
            error = EngineError(f"it sent something that could not be read: {found!r}")
        self._lose(worker, error)

    def _add_stages(self, worker: Worker, message: Message) -> None:
        """Add a worker's stages to the leader's timeline, converted to the leader's clock."""
        timeline, shift = self._timeline.named(f"worker {worker.rank}"), worker.offset_ns
        for name, process, start_ns, end_ns, detail in message.values()["stages"]:
            timeline.record(str(name), int(start_ns) + shift, int(end_ns) + shift, of=str(process), detail=detail)


__all__ = ["Crew"]
