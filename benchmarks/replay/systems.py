"""The systems that a trace is replayed on: how their instances start, and what runs beside the instances."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from medusa_adapters.bench.coldstart.contestants import Medusa, Question
from medusa_adapters.bench.node import Node
from medusa_adapters.bench.served_instance import ServedInstance, medusa_command
from medusa_cluster.simulation.trace import Request
from medusa_runtime.errors import ConfigError, MedusaError

from benchmarks.coldstart.others import OFFLINE
from benchmarks.coldstart.vllm_baselines import VllmBaseline
from benchmarks.ports import free_port

_CONCURRENCY = 16
_SERVER = Path(__file__).parent / "scripts/transformers_server.py"


class System(Protocol):
    """A system under test.

    ``model`` is the model's name in a request, if the system needs one, and ``concurrency`` the number of requests that
    an instance works on at the same time.
    """

    name: str
    model: str
    concurrency: int

    def settle(self) -> None:
        """Wait until the system is ready for a start, for example until a node agent's engine is warm."""

    def start(self) -> ServedInstance:
        """Start an instance. It need not listen yet."""

    def close(self) -> None: ...


class Ours:
    """`medusa serve`, with a state bundle if ``bundle``, and with a node agent's warm engine if ``agent``."""

    model = ""
    concurrency = _CONCURRENCY

    def __init__(self, name: str, folder: Path, *, bundle: bool, agent: bool = False) -> None:
        self.name = name
        self._state = tempfile.TemporaryDirectory(prefix="medusa-replay-") if bundle else None
        flags = ["--state", "none"]
        if self._state is not None:
            _materialize(folder, self._state.name)
            flags = ["--state", self._state.name, "--trust-state", self._state.name]
        self._medusa = Medusa("torch", flags=(*flags, "--max-concurrency", str(_CONCURRENCY)))
        self._question = Question(str(folder), str(folder), "", 1)
        self._node = Node(self._medusa.command, "torch") if agent else None

    def settle(self) -> None:
        if self._node is not None:
            self._node.wait_warm(self._question.model)

    def start(self) -> ServedInstance:
        flags = ("--node-socket", self._node.socket) if self._node is not None else ()
        return self._medusa.start(self._question, *flags)

    def close(self) -> None:
        if self._node is not None:
            self._node.close()
        if self._state is not None:
            self._state.cleanup()


class Transformers:
    """A short server around transformers, which runs one request at a time."""

    name, model, concurrency = "transformers", "", 1

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def settle(self) -> None:
        pass

    def start(self) -> ServedInstance:
        port = free_port()
        return ServedInstance([sys.executable, _SERVER, str(self._folder), str(port)], OFFLINE, port=port)

    def close(self) -> None:
        pass


class Vllm:
    """vLLM's own OpenAI server."""

    model = VllmBaseline.model
    concurrency = _CONCURRENCY

    def __init__(self, name: str, folder: Path, python: str) -> None:
        self.name = name
        self._baseline = VllmBaseline(f"{name}-baseline", python)
        self._question = Question(str(folder), str(folder), "", 1)

    def settle(self) -> None:
        pass

    def start(self) -> ServedInstance:
        return self._baseline.start(self._question)

    def close(self) -> None:
        self._baseline.close()


# Each system by its name. Its arguments are a checkpoint's folder and the interpreter that has vLLM.
SYSTEMS: Mapping[str, Callable[[Path, str], System]] = {
    "medusa": lambda folder, _: Ours("medusa", folder, bundle=False),
    "medusa-bundle": lambda folder, _: Ours("medusa-bundle", folder, bundle=True),
    "medusa-agent": lambda folder, _: Ours("medusa-agent", folder, bundle=True, agent=True),
    "transformers": lambda folder, _: Transformers(folder),
    "vllm-eager": lambda folder, python: Vllm("vllm-eager", folder, python),
    "vllm-warm-cache": lambda folder, python: Vllm("vllm-warm-cache", folder, python),
}
MEANING = {
    "medusa": "`medusa serve` without a state bundle",
    "medusa-bundle": "the same with a bundle",
    "medusa-agent": "the same beside a node agent with one warm engine process",
    "transformers": "a server of a few lines around transformers",
    "vllm-eager": "vLLM's OpenAI server, eager",
    "vllm-warm-cache": "vLLM's OpenAI server, compiled, with its caches filled",
}


def system_named(name: str, folder: Path, vllm_python: str) -> System:
    if name not in SYSTEMS:
        raise ConfigError(f"--systems: expected names of {', '.join(SYSTEMS)}, found {name!r}")
    return SYSTEMS[name](folder, vllm_python)


def body(request: Request, model: str) -> dict[str, Any]:
    """Return the body of a completion request. Token ids differ from request to request, so that nothing is reused."""
    first = round(request.at_s * 1000)
    prompt = [5 + (first + 31 * number) % 900 for number in range(request.prompt_tokens)]
    found: dict[str, Any] = {"prompt": prompt, "max_tokens": request.output_tokens, "temperature": 0}
    return found | {"ignore_eos": True} | ({"model": model} if model else {})


def _materialize(folder: Path, state: str) -> None:
    command = [*medusa_command(), "materialize", "--model", str(folder), "--out", state, "--starts", "1"]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        raise MedusaError(f"`medusa materialize` ended with {made.returncode}: {made.stderr.strip()[-500:]}")
