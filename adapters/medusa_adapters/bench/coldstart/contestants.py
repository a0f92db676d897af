"""The contestants that take turns in a cold-start benchmark. Each sample starts with the exec of a fresh process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from medusa_runtime.timeline import Stage

from ..process import pss_bytes, rss_bytes
from ..served_instance import ServedInstance, medusa_command, serve_command


@dataclass(frozen=True)
class Question:
    """The question to every contestant: a prompt, and the checkpoint to answer it with.

    ``model`` is where Medusa reads from, ``folder`` the same file or files on this machine, or empty. ``sent_bytes``
    returns what the store has sent so far, where a benchmark started one.
    """

    model: str
    folder: str
    prompt: str
    max_tokens: int
    env: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    sent_bytes: Callable[[], int] | None = None

    @property
    def body(self) -> dict[str, Any]:
        """Return the body of the completion request."""
        return {"prompt": self.prompt, "max_tokens": self.max_tokens, "temperature": 0, "ignore_eos": True}


@dataclass(frozen=True)
class Sample:
    """One cold start. ``text`` is the whole answer, and ``first`` its first token, if the contestant reports it.

    ``began_ns`` is the time of the exec on CLOCK_MONOTONIC, which the ``stages`` use, too.
    """

    ttft_s: float
    text: str = ""
    first: str = ""
    ready_s: float | None = None
    pss_mb: float | None = None
    rss_mb: float | None = None
    stages: tuple[Stage, ...] = ()
    began_ns: int = 0


class Contestant(Protocol):
    """A way to start a model, which gives one sample at a time."""

    name: str

    def sample(self, question: Question) -> Sample: ...

    def close(self) -> None: ...


class Server(Protocol):
    """A contestant that stays and serves until it is closed."""

    name: str

    def start(self, question: Question) -> ServedInstance: ...


class Medusa:
    """`medusa serve`, with a client that connects as soon as the port accepts."""

    def __init__(
        self,
        engine: str = "torch",
        *,
        name: str | None = None,
        python: str = sys.executable,
        flags: tuple[str, ...] = (),
    ) -> None:
        self.name = name or engine
        self.engine = engine
        self.command = medusa_command(python)
        self._python = python
        self._flags = ("--engine", engine, *flags)

    def prepared(self, question: Question) -> Question:
        """Make what the question needs, such as a bundle, and return it with that. May take long the first time."""
        return question

    def start(self, question: Question, *flags: str) -> ServedInstance:
        arguments = ("--model", question.model, *self._flags, *question.flags, *flags)
        # An agent or a snapshot that happens to be on this machine has no part in a cold start.
        env = {"MEDUSA_LOG_LEVEL": "warning", "MEDUSA_NODE_SOCKET": "none", "MEDUSA_SNAPSHOTS": "none", **question.env}
        return ServedInstance(serve_command(*arguments, python=self._python), env)

    def sample(self, question: Question) -> Sample:
        with self.start(question) as instance:
            answer = instance.completion(question.body)
            instance.wait_ready(every_s=0.002)
            ready_s = instance.since_start_s()
            stages = instance.stages()
            pids = instance.tree()
            self.check(instance)
            return Sample(
                ttft_s=(answer.first_token_ns - instance.started_ns) / 1e9,
                text=answer.text,
                ready_s=ready_s,
                pss_mb=pss_bytes(pids) / 1e6,
                rss_mb=rss_bytes(pids) / 1e6,
                stages=stages,
                began_ns=instance.started_ns,
            )

    def check(self, instance: ServedInstance) -> None:
        """Check what else must be true of a sample; a subclass raises MedusaError when it is not."""

    def close(self) -> None:
        """Do nothing: this contestant keeps nothing from one sample to the next."""


def weights_mb(question: Question) -> float | None:
    """Return the size of the weights; None unless they are a file or safetensors files on this machine."""
    place = Path(question.folder)
    files = [place] if place.is_file() else list(place.glob("*.safetensors")) if question.folder else []
    return sum(file.stat().st_size for file in files) / 1e6 or None
