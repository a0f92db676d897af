"""The workers of a group as their leader sees them, from the moment that they have come together until they part."""

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
_LAST_STAGES_S = 0.2  # for what the workers' timelines say last


class Crew:
    """Sends to the workers and listens to them; notices when one is lost.

    ``take`` gets what a worker sends, but for its signs of life and its timeline. ``lose`` gets a worker that is lost,
    and why, perhaps more than once. ``served``, called for each of the leader's own signs of life, says whether all of
    the group's layers are loaded. Threads of the crew call all three.
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
                self._start_listening(worker, worker.hidden)  # nothing comes there but the connection's end
        self._beats = Beats(plan.number, 0, self._beat, lambda: {"served": served()})

    @property
    def loaded(self) -> bool:
        """Whether every worker has its layers."""
        return all(worker.loaded for worker in self.workers)

    def send(self, message: Message) -> None:
        """Send to all workers. Raises EngineError when a connection is broken."""
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
        """Let what was sent last leave, then close everything."""
        for worker in self.workers:
            worker.channel.flush(_FLUSH_S)
        time.sleep(_LAST_STAGES_S)
        for worker in self.workers:
            worker.close()

    def _beat(self, message: Message) -> None:
        for worker in self.workers:
            if time.monotonic() - worker.channel.heard > self._plan.silent_s:
                self._lose(worker, EngineError(f"it has been silent for {self._plan.silent_s:g} s"))
            with suppress(MedusaError):  # the channel's reader notices it, too
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
        """Put a worker's timeline into ours, by our clock."""
        timeline, shift = self._timeline.named(f"worker {worker.rank}"), worker.offset_ns
        for name, process, start_ns, end_ns, detail in message.values()["stages"]:
            timeline.record(str(name), int(start_ns) + shift, int(end_ns) + shift, of=str(process), detail=detail)


__all__ = ["Crew"]
