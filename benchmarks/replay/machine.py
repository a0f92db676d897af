"""One machine that scales a model's instances between none and its slots, with real processes and the product's policy.

It does for one node what a cluster's controller and gateway do. ``policy.decide`` says when an instance starts and
ends, and requests wait here until an instance is ready.
"""

from __future__ import annotations

import http.client
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from medusa_adapters.bench.openai_client import stream
from medusa_adapters.bench.served_instance import ServedInstance
from medusa_cluster.policy.decide import Memory, Options, decide
from medusa_cluster.policy.scaling import Bounds
from medusa_cluster.policy.state import (
    ClusterState,
    Copy,
    Deployment,
    Instance,
    InstanceState,
    Load,
    Node,
    StartInstance,
    StopInstance,
)
from medusa_cluster.simulation.trace import Request
from medusa_runtime.errors import MedusaError

from benchmarks.replay.systems import System, body

TICK_S = 0.1
_NODE, _URL, _NAME = "machine", "file:///model", "model"


def policy(keep_alive_s: float) -> Options:
    """Return the policy for one machine that always has the weights."""
    return Options(bounds=Bounds(keep_alive_s=keep_alive_s), pool=False, from_peers=False, forwarding=False)


@dataclass(eq=False)
class Answer:
    """A request, and when its first and last tokens came, in seconds since the replay began (-1 if they did not)."""

    request: Request
    first_s: float = -1.0
    done_s: float = -1.0
    error: str = ""

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.request.at_s if self.first_s >= 0 else float("inf")

    @property
    def tpot_s(self) -> float:
        later = self.request.output_tokens - 1
        if self.done_s < 0:
            return float("inf")
        return (self.done_s - self.first_s) / later if later > 0 else 0.0


@dataclass(eq=False)
class _Running:
    id: str
    served: ServedInstance
    began_s: float
    since_s: float
    state: InstanceState = "starting"
    requests: int = 0
    closing: bool = False


@dataclass
class Replayed:
    """The results of a replay. ``node_s`` is the sum of the seconds of all instances, from exec to end."""

    answers: list[Answer] = field(default_factory=list)
    node_s: float = 0.0
    starts: int = 0


class Machine:
    """A machine that replays requests on at most ``slots`` instances of a system, started and ended by the policy."""

    def __init__(self, system: System, *, slots: int, keep_alive_s: float) -> None:
        self._system, self._slots = system, slots
        self._deployment = Deployment(_NAME, _URL, size_bytes=1, max=slots, concurrency=system.concurrency)
        self._options = policy(keep_alive_s)
        self._memory = Memory()
        self._found = Replayed()
        self._queue: deque[Answer] = deque()
        self._instances: dict[str, _Running] = {}
        self._last_request_s = -1e9
        self._in_flight = 0
        self._changed = threading.Condition()
        self._began_s = 0.0
        self._failure: MedusaError | None = None

    def replay(self, requests: Sequence[Request]) -> Replayed:
        """Send all requests at their times, and return when the last instance has ended.

        Raises MedusaError when an instance does not start.
        """
        self._began_s = time.monotonic()
        waiting, tick_at = deque(requests), 0.0
        try:
            while waiting or self._queue or self._in_flight or self._instances:
                now = self._now()
                while waiting and waiting[0].at_s <= now:
                    self._arrive(waiting.popleft())
                if self._failure is not None:
                    raise self._failure
                if now >= tick_at:
                    self._tick(now)
                    tick_at = now + TICK_S
                until = min(tick_at, waiting[0].at_s if waiting else tick_at)
                with self._changed:
                    self._changed.wait(max(until - self._now(), 0.0))
        finally:
            for running in list(self._instances.values()):
                running.served.close()
        return self._found

    def _now(self) -> float:
        return time.monotonic() - self._began_s

    def _arrive(self, request: Request) -> None:
        answer = Answer(request)
        self._found.answers.append(answer)
        self._last_request_s = self._now()
        with self._changed:
            self._queue.append(answer)
        self._dispatch()

    def _dispatch(self) -> None:
        """Give each waiting request to the ready instance with the most room, while there is one."""
        with self._changed:
            while self._queue:
                ready = [one for one in self._instances.values() if one.state == "ready"]
                least = min(ready, key=lambda one: one.requests, default=None)
                if least is None or least.requests >= self._system.concurrency:
                    return
                least.requests += 1
                self._in_flight += 1
                threading.Thread(target=self._ask, args=(self._queue.popleft(), least), daemon=True).start()

    def _ask(self, answer: Answer, running: _Running) -> None:
        try:
            connection = running.served.connect()
            try:
                found = stream(connection, body(answer.request, self._system.model))
            finally:
                connection.close()
            answer.first_s = found.first_token_ns / 1e9 - self._began_s
            answer.done_s = found.end_ns / 1e9 - self._began_s
        except (MedusaError, OSError, http.client.HTTPException, ValueError) as error:
            answer.error = str(error)
        with self._changed:
            running.requests -= 1
            self._in_flight -= 1
            self._changed.notify()
        self._dispatch()

    def _tick(self, now: float) -> None:
        with self._changed:
            seen = tuple(
                Instance(one.id, _NAME, _NODE, one.state, one.since_s, running=one.requests)
                for one in self._instances.values()
            )
            waited = now - self._queue[0].request.at_s if self._queue else 0.0
            load = Load(
                waiting=len(self._queue),
                running=self._in_flight,
                longest_wait_s=waited,
                last_request_s=self._last_request_s,
            )
        node = Node(_NODE, devices=self._slots, copies=(Copy(_URL, 1, 1, pinned=True),), instances=seen)
        state = ClusterState({_NODE: node}, {_NAME: self._deployment}, {_NAME: load})
        decisions, self._memory = decide(state, now, self._memory, self._options)
        for decision in decisions:
            if isinstance(decision, StartInstance):
                self._start(decision.id, now)
            elif isinstance(decision, StopInstance):
                self._instances[decision.id].state = "draining"
        for running in list(self._instances.values()):
            if running.state == "draining" and not running.requests and not running.closing:
                running.closing = True
                threading.Thread(target=self._end, args=(running,), daemon=True).start()

    def _start(self, id: str, now: float) -> None:
        # Start it in this thread, which lives as long as the replay: the kernel ends a child with its parent thread.
        running = self._instances[id] = _Running(id, self._system.start(), now, now)
        self._found.starts += 1
        threading.Thread(target=self._await, args=(running,), daemon=True).start()

    def _await(self, running: _Running) -> None:
        try:
            running.served.connect().close()
        except (MedusaError, OSError) as error:
            self._failure = error if isinstance(error, MedusaError) else running.served.failure(str(error))
            return
        with self._changed:
            if running.state == "starting":
                running.state, running.since_s = "ready", self._now()
        self._dispatch()

    def _end(self, running: _Running) -> None:
        running.served.close()
        with self._changed:
            self._found.node_s += self._now() - running.began_s
            del self._instances[running.id]
            self._changed.notify()


def unanswered(found: Replayed) -> int:
    """Return the number of requests without an answer, and print the first reasons."""
    failed = [answer for answer in found.answers if answer.error]
    for answer in failed[:3]:
        print(f"no answer at {answer.request.at_s:.1f} s: {answer.error}", file=sys.stderr)
    return len(failed)
