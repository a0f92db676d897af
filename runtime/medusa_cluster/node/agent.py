"""The node agent of this machine, which the node server starts, keeps running and asks without blocking."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from medusa_runtime.errors import MedusaError, NodeError
from medusa_runtime.node.client import NodeClient

from .gpus import gpu_environment
from .processes.child import Child, RestartingChild
from .settings import NodeServerSettings

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_STATUS_WAITS = 100  # of 10 ms
_STATUS_WITHIN_S = 0.5
_FETCHES = 16
_MOST_FAILURES = 100  # of fetches, that are kept


class Agent:
    """A child process that runs ``medusa node``. Threads ask it, because its client blocks."""

    def __init__(self, settings: NodeServerSettings) -> None:
        self._settings = settings
        self._status_thread = ThreadPoolExecutor(1, "agent-status")
        self._threads = ThreadPoolExecutor(_FETCHES, "agent")
        self._child = RestartingChild(self._start, self._on_end)
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._asking: asyncio.Task[dict[str, Any]] | None = None
        self.failures: dict[str, str] = {}  # URL → why the last fetch of this model failed
        self.last_status: dict[str, Any] = {}

    @property
    def starts(self) -> int:
        return self._child.starts

    @property
    def pid(self) -> int | None:
        return None if self._child.child is None else self._child.child.pid

    def begin(self) -> None:
        self._child.begin()

    async def end(self) -> None:
        for task in self._fetches.values():
            task.cancel()
        await self._child.end(grace_s=5.0)
        self._status_thread.shutdown(wait=False, cancel_futures=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> Child:
        settings = self._settings
        command = [sys.executable, "-m", "medusa_adapters", "node", "--socket", str(settings.agent_socket)]
        command += ["--cluster", str(settings.control_socket), "--cluster-token", str(settings.token_file)]
        if settings.tls is not None:
            command += ["--cluster-ca", str(settings.tls.authority)]
            command += ["--cluster-cert", str(settings.tls.certificate), "--cluster-key", str(settings.tls.key)]
        if settings.memory_budget:
            command += ["--memory-budget", settings.memory_budget]
        if settings.prewarm:
            command += ["--prewarm", settings.prewarm]
        environment = {name: value for name, value in os.environ.items() if name != "MEDUSA_NODE_SOCKET"}
        environment |= settings.log_environment | gpu_environment(settings.gpus) | {"PYTHONUNBUFFERED": "1"}
        return Child(command, environment, settings.log_folder / "agent.log")

    async def _on_end(self, child: Child) -> None:
        logger.error("the node agent ended (%s): %s; starting it again", child.how, child.last_words)

    async def status(self) -> dict[str, Any]:
        """Return the agent's status. While it does not answer, return its last one with ``"away": True``."""
        asking = self._asking
        if asking is None or asking.done():
            asking = self._asking = asyncio.create_task(self._ask_status())
        # Do not wait long: to the controller, a node whose status is late is lost.
        answered, _ = await asyncio.wait({asking}, timeout=_STATUS_WITHIN_S)
        return asking.result() if answered else self.last_status | {"away": True}

    async def _ask_status(self) -> dict[str, Any]:
        try:
            self.last_status = await self._ask(self._status_thread, lambda client: client.status(), _STATUS_WAITS)
        except NodeError:
            return self.last_status | {"away": True}
        return self.last_status

    def fetch(self, url: str, *, pin: bool, version: str, layers: str | None = None) -> None:
        """Begin to fetch a model. Its progress is in the status.

        If ``version`` is given and the agent has another one, the model is fetched anew. ``layers`` is START:STOP, the
        layers that are fetched first. While an earlier request for this URL is under way, does nothing.
        """
        running = self._fetches.get(url)
        if running is not None and not running.done():
            return
        self.failures.pop(url, None)
        regions = [region for region in self.last_status.get("regions", ()) if region["url"] == url]
        fresh = bool(version) and any(region["version"] not in ("", version) for region in regions)
        self._fetches[url] = asyncio.create_task(self._fetch(url, pin, fresh, layers))

    async def _fetch(self, url: str, pin: bool, fresh: bool, layers: str | None) -> None:
        def begin(client: NodeClient) -> None:
            client.region(url, pin=pin, fresh=fresh, background=True, layers=layers).close()

        try:
            await self._ask(self._threads, begin)
        except MedusaError as error:
            self.failures[url] = f"{error} [{error.code}]"
            if len(self.failures) > _MOST_FAILURES:  # of models that are deployed no more, perhaps
                del self.failures[next(iter(self.failures))]
            logger.warning("fetching %s failed: %s", url, error)
        finally:
            self._fetches.pop(url, None)

    async def drop(self, url: str) -> None:
        await self._ask(self._threads, lambda client: client.drop(url))

    async def unpin(self, url: str) -> None:
        await self._ask(self._threads, lambda client: client.unpin(url))

    async def _ask(
        self, threads: ThreadPoolExecutor, question: Callable[[NodeClient], _Answer], waits: int = 1000
    ) -> _Answer:
        def ask() -> _Answer:
            client = NodeClient(str(self._settings.agent_socket), waits=waits)
            try:
                return question(client)
            finally:
                client.close()

        return await asyncio.get_running_loop().run_in_executor(threads, ask)
