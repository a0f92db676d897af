"""Who takes part in a cold-start benchmark: each gives one sample, from the exec of a fresh process."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from medusa_runtime.errors import MissingPackageError, UnreachableError
from medusa_runtime.timeline import Stage

from . import openai_client
from .process import Process, pss_bytes, rss_bytes

SCRIPTS = Path(__file__).parent / "scripts"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
START_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Question:
    """What every contestant is asked. ``model`` is where ours reads from, ``folder`` the same files on this machine.

    ``sent_bytes`` tells what the origin has sent so far, where there is one.
    """

    model: str
    folder: str
    prompt: str
    max_tokens: int
    env: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    sent_bytes: Callable[[], int] | None = None


@dataclass(frozen=True)
class Sample:
    """One cold start, which began at ``began_ns`` (CLOCK_MONOTONIC) where ``stages`` tell of it. ``text`` is the whole
    answer, ``first`` its first token where the contestant tells it apart."""

    ttft_s: float
    text: str = ""
    first: str = ""
    ready_s: float | None = None
    pss_mb: float | None = None
    rss_mb: float | None = None
    stages: tuple[Stage, ...] = ()
    began_ns: int = 0


class Contestant(Protocol):
    name: str

    def sample(self, question: Question) -> Sample: ...

    def close(self) -> None: ...


class _Nothing:
    """Of contestants that keep nothing from one sample to the next."""

    def close(self) -> None:
        pass


class Medusa(_Nothing):
    """`medusa serve`, with a client that connects as soon as the port accepts."""

    model: str | None = None  # to name in requests; ours serves one

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
        self._flags = ("--engine", engine, *flags)

    def prepared(self, question: Question) -> Question:
        """The question as it can be asked; may take long, the first time."""
        return question

    def start(self, question: Question, port: int, *flags: str) -> Process:
        command = [*self.command, "serve", "--model", question.model, *self._flags]
        command += ["--host", "127.0.0.1", "--port", str(port), *question.flags, *flags]
        # An agent that happens to run on this machine is none of a cold start.
        return Process(command, {"MEDUSA_LOG_LEVEL": "warning", "MEDUSA_NODE_SOCKET": "none", **question.env})

    def sample(self, question: Question) -> Sample:
        port = openai_client.free_port()
        with self.start(question, port) as process:
            connection = connect(process, port)
            answer = ask(process, connection, question)
            wait_ready(process, connection)
            ready_s = process.since_start_s()
            stages = ask_stages(process, connection)
            pids = process.tree()
            return Sample(
                ttft_s=(answer.first_token_ns - process.started_ns) / 1e9,
                text=answer.text,
                ready_s=ready_s,
                pss_mb=pss_bytes(pids) / 1e6,
                rss_mb=rss_bytes(pids) / 1e6,
                stages=stages,
                began_ns=process.started_ns,
            )


class Transformers(_Nothing):
    """A bare script: AutoTokenizer and AutoModelForCausalLM from the folder, then one forward pass."""

    name = "transformers"

    def sample(self, question: Question) -> Sample:
        script = str(SCRIPTS / "transformers_generate.py")
        command = [sys.executable, script, question.folder, question.prompt, str(question.max_tokens)]
        with Process(command, OFFLINE) as process:
            first = json.loads(process.line())["text"]
            ttft_s = process.since_start_s()
            text = json.loads(process.line())["text"]
            return Sample(ttft_s, text, first)


class Script(_Nothing):
    """A process that does a part of the work, as a yardstick; its first line of output ends the sample."""

    def __init__(self, name: str, arguments: Callable[[Question], list[str]], *, python: str = sys.executable) -> None:
        self.name = name
        self._arguments = arguments
        self._python = python

    def sample(self, question: Question) -> Sample:
        with Process([self._python, *self._arguments(question)]) as process:
            process.line()
            return Sample(process.since_start_s())


def yardsticks() -> list[Contestant]:
    return [
        Script("torch-import", lambda _: ["-c", "import torch; print(torch.__version__, flush=True)"]),
        Script("floor", lambda question: [str(SCRIPTS / "floor.py"), question.folder, question.prompt]),
    ]


def others(names: list[str]) -> list[Contestant]:
    """The contestants of ``--vs``. Raises MissingPackageError with the command that installs what is missing."""
    found: list[Contestant] = []
    for name in names:
        if name == "transformers":
            if importlib.util.find_spec("transformers") is None:
                raise MissingPackageError("--vs transformers: it is not installed; pip install transformers")
            found.append(Transformers())
    return found


def ask_stages(process: Process, connection: openai_client.Connection) -> tuple[Stage, ...]:
    """The stages of an instance's start, as it reports them. Raises MedusaError with what it said when it ends."""
    with process.answering():
        status, timeline = openai_client.get(connection, "/timeline")
    return stages_from_json(timeline) if status == 200 else ()


def stages_from_json(timeline: object) -> tuple[Stage, ...]:
    """The stages of what /timeline answers."""
    entries = timeline.get("stages", []) if isinstance(timeline, dict) else []
    return tuple(
        Stage(e["name"], e["process"], int(e["start_ns"]), int(e["end_ns"]), e.get("detail") or {}) for e in entries
    )


def connect(process: Process, port: int) -> openai_client.Connection:
    """A connection to a process that is starting. Raises MedusaError with what it said when it ends before."""
    try:
        return openai_client.connect(port, process.alive, START_TIMEOUT_S)
    except UnreachableError:
        if process.alive():
            raise
        raise process.failure("ended before it was listening") from None


def wait_ready(
    process: Process, connection: openai_client.Connection, pause_s: float = 0.0, path: str = "/readyz"
) -> None:
    """Ask ``path`` every ``pause_s`` seconds until it is 200. Raises MedusaError when the process ends before."""
    with process.answering():
        while openai_client.get(connection, path)[0] != 200:
            if not process.alive():
                raise process.failure(f"ended before {path} answered 200")
            time.sleep(pause_s)


def ask(
    process: Process, connection: openai_client.Connection, question: Question, model: str | None = None
) -> openai_client.Completion:
    body = {"prompt": question.prompt, "max_tokens": question.max_tokens, "temperature": 0, "ignore_eos": True}
    with process.answering():
        return openai_client.stream(connection, body | ({"model": model} if model else {}))


def medusa_command(python: str) -> list[str]:
    """The command `medusa` of an interpreter."""
    installed = Path(python).with_name("medusa")
    return [str(installed)] if installed.exists() else [python, "-m", "medusa_adapters.cli.main"]
