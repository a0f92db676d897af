"""Ours beside a node agent: the function is up, its engine is not; timed from the request to the first token."""

from __future__ import annotations

import time

from . import openai_client
from .contestants import Medusa, Question, Sample, ask, ask_stages, connect, wait_ready
from .node import Node
from .process import Process

_LOOK_EVERY_S = 0.01


class Prewarmed(Medusa):
    """`medusa serve --engine-start request`: its first request takes a warm engine process of the node's.

    ``ready_s`` is from exec until the function answers probes, which no request waits for. Raises MedusaError when the
    instance started an engine of its own, as that would measure something else.
    """

    def __init__(self, engine: str, *, name: str, python: str, flags: tuple[str, ...] = ()) -> None:
        super().__init__(engine, name=name, python=python, flags=flags)
        self._node = Node(self.command, engine)

    def sample(self, question: Question) -> Sample:
        question = self.prepared(question)
        self._node.wait_warm(question.model)
        port = openai_client.free_port()
        flags = ("--node-socket", self._node.socket, "--engine-start", "request")
        with self.start(question, port, *flags) as process:
            connection = connect(process, port)
            wait_ready(process, connection, _LOOK_EVERY_S, "/livez")
            ready_s = process.since_start_s()
            with process.answering():
                self.await_weights(connection)
            asked_ns = time.monotonic_ns()
            answer = ask(process, connection, question)
            stages = ask_stages(process, connection)
            if not any(stage.name == "engine" and stage.detail.get("source") == "node" for stage in stages):
                raise process.failure("started an engine of its own, expected it to take the node's")
            self.check(process, port)
            sample = Sample(
                ttft_s=(answer.first_token_ns - asked_ns) / 1e9,
                text=answer.text,
                ready_s=ready_s,
                stages=tuple(stage for stage in stages if stage.end_ns >= asked_ns),
                began_ns=asked_ns,
            )
        self._node.wait_warm(question.model)  # the next one warms up now, and not while others are measured
        return sample

    def await_weights(self, connection: openai_client.Connection) -> None:
        """The weights lie in the node's region before a function needs them."""
        while True:
            total, fetched = (metric(connection, f"medusa_{name}_bytes") for name in ("weights", "fetched"))
            if total and fetched == total:
                return
            time.sleep(_LOOK_EVERY_S)

    def check(self, process: Process, port: int) -> None:
        """What else must be true of a sample."""

    def close(self) -> None:
        self._node.close()


def metric(connection: openai_client.Connection, name: str) -> float | None:
    """A metric of an instance, of which there is one; None while there is none of this name."""
    connection.request("GET", "/metrics")
    for line in connection.getresponse().read().decode().splitlines():
        if line.startswith((f"{name} ", f"{name}{{")):
            return float(line.rpartition(" ")[2])
    return None
