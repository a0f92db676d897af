"""A node agent with idle engine processes, beside which a benchmark starts functions."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_runtime.errors import MedusaError
from medusa_runtime.node.client import NodeClient
from medusa_runtime.node.regions.model_key import absolute
from medusa_runtime.timeline import Stage

from .process import Process

_WARM_TIMEOUT_S = 600.0
_LOOK_EVERY_S = 0.01


class Node:
    """`medusa node` with one warm process of ``engine``. Started by the first ``wait_warm``, ended by ``close``."""

    def __init__(self, medusa: Sequence[str], engine: str, env: Mapping[str, str] | None = None) -> None:
        self._medusa = medusa
        self._engine = engine
        self._env = env
        self._folder = tempfile.TemporaryDirectory(prefix="medusa-bench-node-")
        self._process: Process | None = None
        self.socket = str(Path(self._folder.name) / "node.sock")

    def wait_warm(self, model: str) -> None:
        """Wait until an engine process is warm. Raises MedusaError with what the agent printed when none comes.

        It may run the code in the bundle of the ``model`` that is named first.
        """
        if self._process is None:
            command = [*self._medusa, "node", "--socket", self.socket, "--prewarm", f"{self._engine}=1"]
            command += ["--trust-state", absolute(model), "--log-level", "warning"]
            self._process = Process(command, self._env)
        deadline = time.monotonic() + _WARM_TIMEOUT_S
        while time.monotonic() < deadline:
            if not self._process.alive():
                raise self._process.failure("ended")
            engines = self._status().get("engines", {}).get(self._engine, {})
            if engines.get("failure"):
                raise self._process.failure(f"has no {self._engine} engine: {engines['failure']}")
            if engines.get("warm"):
                return
            time.sleep(_LOOK_EVERY_S)
        raise self._process.failure(f"has no warm {self._engine} engine after {_WARM_TIMEOUT_S:.0f} s")

    @property
    def process(self) -> Process:
        """The agent with all processes that it has forked. Only after ``wait_warm``."""
        assert self._process is not None
        return self._process

    def _status(self) -> dict[str, Any]:
        """Return the agent's status, empty while it does not answer."""
        try:
            client = NodeClient(self.socket)
        except (MedusaError, OSError):
            return {}
        try:
            return client.status()
        except (MedusaError, OSError):
            return {}
        finally:
            client.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None
        self._folder.cleanup()


def taken_engine(stages: Sequence[Stage]) -> int | None:
    """Return the engine process that a function took from the node; None if the function started its own."""
    taken = [stage.detail["pid"] for stage in stages if stage.name == "engine" and stage.detail.get("source") == "node"]
    return int(taken[0]) if taken else None
