"""`medusa serve` beside a node agent: the function is up without an engine, and its first request takes a warm one."""

from __future__ import annotations

import time

from ..node import Node, taken_engine
from ..served_instance import ServedInstance
from .contestants import Medusa, Question, Sample

_LOOK_EVERY_S = 0.01


class PrewarmedMedusa(Medusa):
    """`medusa serve --engine-start request`, timed from the request to the first token.

    ``ready_s`` is from exec until the function answers probes, which no request waits for. Raises MedusaError when the
    instance started an engine of its own, as that would measure something else.
    """

    def __init__(self, engine: str, *, name: str, python: str, flags: tuple[str, ...] = ()) -> None:
        super().__init__(engine, name=name, python=python, flags=flags)
        self._node = Node(self.command, engine)

    def sample(self, question: Question) -> Sample:
        question = self.prepared(question)
        self._node.wait_warm(question.model)
        flags = ("--node-socket", self._node.socket, "--engine-start", "request")
        with self.start(question, *flags) as instance:
            instance.wait_ready("/livez", _LOOK_EVERY_S)
            ready_s = instance.since_start_s()
            await_weights(instance)
            asked_ns = time.monotonic_ns()
            answer = instance.completion(question.body)
            stages = instance.stages()
            if taken_engine(stages) is None:
                raise instance.failure("started an engine of its own, expected it to take the node's")
            self.check(instance)
            sample = Sample(
                ttft_s=(answer.first_token_ns - asked_ns) / 1e9,
                text=answer.text,
                ready_s=ready_s,
                stages=tuple(stage for stage in stages if stage.end_ns >= asked_ns),
                began_ns=asked_ns,
            )
        self._node.wait_warm(question.model)  # the next one warms up now, and not while others are measured
        return sample

    def close(self) -> None:
        self._node.close()


def await_weights(instance: ServedInstance) -> None:
    """Wait until the weights lie in the node's region, as they do before a function needs them."""
    while True:
        total, fetched = (instance.metric(f"medusa_{name}_bytes") for name in ("weights", "fetched"))
        if total and fetched == total:
            return
        time.sleep(_LOOK_EVERY_S)
