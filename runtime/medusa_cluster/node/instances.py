"""The instances of a node: ``medusa serve`` processes on loopback ports, with regions and engines from the agent."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa_runtime.errors import ConfigError, InstanceError

from ..deployment import GROUP_ENGINES, Deployment
from .gpus import GpuLoan, Gpus, gpu_environment
from .group_worker import GroupWorker
from .processes.child import Child, message_of
from .settings import NodeServerSettings

logger = logging.getLogger(__name__)

_LISTENING = re.compile(r"listening on http://[^\s]+:(\d+)$")
_LISTENS_WITHIN_S = 60.0
_KILLED_AFTER_S = 10.0  # how long an instance without requests may take to end
_LAST_WORDS_S = 1.0  # for the output of its last processes
_POLL_S = 0.05  # between two checks of an instance that drains
_KEPT_ENDS_S = 60.0  # how long the status shows an instance that ended by itself
_KEPT_LOGS = 50  # of instances that ended by themselves
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass
class RunningInstance:
    """A ``medusa serve`` process.

    ``secret`` is the bearer token that it demands of requests; only this node server knows it. ``listening`` gets its
    port.
    """

    id: str
    deployment: Deployment
    secret: str
    listening: asyncio.Future[int]
    state: str = "starting"
    ending: bool = False  # it drained, and its process is being ended
    since_s: float = field(default_factory=time.monotonic)  # when its state began
    child: Child | None = None
    running: int = 0  # requests that the node server forwards to it now
    kv_use: float = 0.0  # the part of its KV cache that was in use when that was looked at; see instance_readers.py
    prefill_tokens_per_s: float = 0.0  # of prompts, at most; 0: not known yet
    first_request_ns: int | None = None  # when the first POST came, by the monotonic clock
    version: str = ""  # the model's: the one that the agent had at the start, or else the first that it got later
    answers: bool = False  # it has been ready to answer; see instance_readers.py
    failure: str | None = None
    worker: GroupWorker | None = None
    gpus: GpuLoan | None = None
    start: dict[str, float] | None = None  # how long the start took; see instance_readers.py
    # A leader's becomes consolidated or alone; a helper's perhaps prefilling, then released.
    group_state: str = "serving"
    has_prefilled: bool = False

    @property
    def works(self) -> bool:
        """Whether this instance computes: for requests of its own, or prompts of another instance."""
        return self.running > 0 or self.group_state == "prefilling"

    @property
    def is_released(self) -> bool:
        """Whether it was told to prefill for no other instance any more, as soon as it has handed over what it has."""
        return self.state == "draining" or (self.worker is not None and self.worker.plan.then == "up")

    @property
    def port(self) -> int | None:
        done = self.listening.done() and not self.listening.cancelled() and self.listening.exception() is None
        return self.listening.result() if done else None

    def set_state(self, state: str) -> None:
        self.state, self.since_s = state, time.monotonic()


class Instances:
    """The instances of this node, by id. Starting an id twice gives the same instance, so a call may be repeated."""

    def __init__(self, settings: NodeServerSettings) -> None:
        self._settings = settings
        self.gpus = Gpus(settings.gpus, settings.gpu_bytes_per_s)
        self._instances: dict[str, RunningInstance] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        # The logs of instances that ended by themselves, the oldest first; also with an earlier node server.
        self._failed_logs = deque(
            sorted(settings.log_folder.glob("instance-*.log"), key=lambda log: log.stat().st_mtime_ns)
        )
        self._remove_old_logs()
        for left in settings.folder.glob("group-*.json*"):  # of such instances
            left.unlink()

    def get(self, instance_id: str) -> RunningInstance | None:
        return self._instances.get(instance_id)

    def add(self, instance: RunningInstance) -> None:
        """Add an instance, so that requests for its id are forwarded to it."""
        self._instances[instance.id] = instance

    def all(self) -> list[RunningInstance]:
        return list(self._instances.values())

    @property
    def pids(self) -> set[int]:
        return {instance.child.pid for instance in self._instances.values() if instance.child is not None}

    async def start(
        self, instance_id: str, deployment: Deployment, worker: GroupWorker | None = None, device_bytes: int = 0
    ) -> int:
        """Start an instance, and return its port as soon as it listens. Raises InstanceError if it never does.

        ``worker`` makes it a worker of a group that shares the model. ``device_bytes``: for which it needs room on each
        of its GPUs. Raises ConfigError for a malformed id.
        """
        if not _ID.fullmatch(instance_id):
            raise ConfigError(f"id: expected letters, digits and . _ -, found {instance_id[:100]!r}")
        instance = self._instances.get(instance_id)
        if instance is None:
            instance = self._begin(instance_id, deployment, worker, device_bytes)
        if instance.failure is not None:
            raise InstanceError(instance.failure)
        try:
            async with asyncio.timeout(_LISTENS_WITHIN_S):
                return await asyncio.shield(instance.listening)
        except TimeoutError:
            raise InstanceError(f"{instance_id} does not listen after {_LISTENS_WITHIN_S:.0f} s") from None

    def _begin(
        self, instance_id: str, deployment: Deployment, worker: GroupWorker | None, device_bytes: int
    ) -> RunningInstance:
        listening: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        # Read its exception, which asyncio would log if no caller awaits it.
        listening.add_done_callback(lambda future: future.cancelled() or future.exception())
        instance = RunningInstance(instance_id, deployment, secrets.token_hex(16), listening, worker=worker)
        self.add(instance)

        def on_line(line: str) -> None:
            found = _LISTENING.match(message_of(line))
            if found and not listening.done():
                listening.set_result(int(found[1]))
                if instance.state == "starting":
                    instance.set_state("ready")

        try:
            instance.gpus = self.gpus.lend(instance_id, deployment, device_bytes)
            instance.child = Child(
                self._command(deployment, worker),
                self._environment(instance),
                self._log(instance),
                on_line,
            )
        except (OSError, ValueError, ConfigError, InstanceError) as error:
            self._failed(instance, f"{instance_id} could not start on the node {self._settings.name}: {error}")
        else:
            task = asyncio.create_task(self._follow(instance, instance.child))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return instance

    def _command(self, deployment: Deployment, worker: GroupWorker | None) -> list[str]:
        engine = deployment.engine if worker is None else GROUP_ENGINES[deployment.engine]
        return [
            *(sys.executable, "-m", "medusa_adapters", "serve"),
            *("--model", deployment.url, "--served-model-name", deployment.name, "--engine", engine),
            *("--host", "127.0.0.1", "--port", "0", "--platform", "local"),
            *("--node-socket", str(self._settings.agent_socket)),
        ]

    def _environment(self, instance: RunningInstance) -> dict[str, str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MEDUSA_")}
        environment.pop("PORT", None)
        return (
            environment
            | self._settings.log_environment
            | instance.deployment.environment()
            | {
                "MEDUSA_TOKEN": instance.secret,
                "PYTHONUNBUFFERED": "1",
            }
            | gpu_environment(self._settings.gpus)
            | (instance.gpus.environment if instance.gpus is not None else {})
            | ({} if instance.worker is None else instance.worker.environment(self._group_file(instance)))
        )

    def _log(self, instance: RunningInstance) -> Path:
        return self._settings.log_folder / f"instance-{instance.id}.log"

    def _keep_log(self, log: Path) -> None:
        """Keep the log of an instance that ended by itself, and remove the oldest of many."""
        if log not in self._failed_logs:
            self._failed_logs.append(log)
        self._remove_old_logs()

    def _remove_old_logs(self) -> None:
        while len(self._failed_logs) > _KEPT_LOGS:
            self._failed_logs.popleft().unlink(missing_ok=True)

    def _group_file(self, instance: RunningInstance) -> Path:
        return self._settings.folder / f"group-{instance.id}.json"

    def consolidate(self, instance_id: str, keep: int) -> None:
        """Write into the file of a group's leader how many workers become instances.

        Raises ConfigError if the id is not that of a group's leader.
        """
        instance = self._instances.get(instance_id)
        if instance is None or instance.worker is None:
            raise ConfigError(f"id: expected the instance of a group's leader, found {instance_id!r}")
        instance.worker = instance.worker.with_keep(keep)
        instance.worker.write(self._group_file(instance))

    def release(self, instance_id: str) -> None:
        """Let an instance that prefills for another one become an instance with requests of its own.

        Raises ConfigError if the id is not that of one that prefills.
        """
        instance = self._instances.get(instance_id)
        if instance is None or instance.worker is None or instance.failure is not None or instance.ending:
            raise ConfigError(f"id: expected an instance that prefills for another one, found {instance_id!r}")
        instance.worker = instance.worker.released()
        instance.worker.write(self._group_file(instance))

    def note_released(self, instance: RunningInstance) -> None:
        """Let the instance's file say that it helps nobody any more."""
        lost = instance.has_prefilled and not instance.is_released
        worker = None if instance.worker is None else instance.worker.as_instance(lost=lost)
        if worker is not None and worker is not instance.worker:
            instance.worker = worker
            if instance.failure is None and not instance.ending:
                worker.write(self._group_file(instance))

    async def _follow(self, instance: RunningInstance, child: Child) -> None:
        await child.wait()
        self.gpus.take_back(instance.gpus)
        self._group_file(instance).unlink(missing_ok=True)
        if instance.state == "draining":
            self._instances.pop(instance.id, None)
            if not instance.listening.done():
                instance.listening.set_exception(InstanceError(f"{instance.id} was ended before it listened"))
            self._log(instance).unlink(missing_ok=True)
            return
        node, last = self._settings.name, child.last_words
        self._failed(instance, f"{instance.id} ended by itself on the node {node} ({child.how}): {last}")

    def _failed(self, instance: RunningInstance, failure: str) -> None:
        logger.error("%s", failure)
        self.gpus.take_back(instance.gpus)
        instance.failure = failure
        instance.set_state("failed")
        self._keep_log(self._log(instance))
        if not instance.listening.done():
            instance.listening.set_exception(InstanceError(failure))
        asyncio.get_running_loop().call_later(_KEPT_ENDS_S, self._forget, instance)

    def _forget(self, instance: RunningInstance) -> None:
        if self._instances.get(instance.id) is instance:  # else a later instance has its id
            del self._instances[instance.id]

    async def stop(self, instance_id: str, drain_s: float) -> bool:
        """End an instance when its running requests have ended, or after ``drain_s``. Ignores an unknown id.

        Returns False if the instance was resumed meanwhile. Requests that run longer are broken off, and gateways run
        them again elsewhere.
        """
        instance = self._instances.get(instance_id)
        if instance is None or instance.child is None or instance.failure is not None:
            self._instances.pop(instance_id, None)
            return True
        if instance.state != "draining":
            instance.set_state("draining")
            deadline = asyncio.get_running_loop().time() + drain_s
            if instance.group_state == "prefilling":
                self.release(instance.id)  # so that it hands over what it has begun
            while instance.works and asyncio.get_running_loop().time() < deadline and instance.child.status is None:
                await asyncio.sleep(_POLL_S)
                if instance.state != "draining":
                    return False
            instance.ending = True
            await instance.child.end(0.0 if instance.running else _KILLED_AFTER_S)
            self.gpus.take_back(instance.gpus)
        else:
            while instance.child.status is None:
                await asyncio.sleep(_POLL_S)
                if instance.state != "draining":
                    return False
        self._instances.pop(instance_id, None)
        return True

    def resume(self, instance_id: str) -> bool:
        """Let an instance that drains take requests again; returns False where it is too late.

        One that is ready stays so, so that a call may be repeated.
        """
        instance = self._instances.get(instance_id)
        if instance is None or instance.ending or instance.port is None or instance.failure is not None:
            return False
        if instance.state == "draining":
            instance.set_state("ready")
        return True

    def status(self, versions: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the status of every instance. ``versions``: URL → the version of the model that the agent has."""
        for instance in self._instances.values():
            instance.version = instance.version or versions.get(instance.deployment.url, "")
        return [
            {
                "id": instance.id,
                "model": instance.deployment.name,
                "url": instance.deployment.url,
                "state": instance.state,
                "age_s": round(time.monotonic() - instance.since_s, 3),
                "running": instance.running,
                "kv_use": round(instance.kv_use, 2) if instance.running else 0.0,
                "prefill_tokens_per_s": round(instance.prefill_tokens_per_s),
                "version": instance.version,
                "answers": instance.answers,
                "deployment": instance.deployment.digest,
                "device": instance.deployment.device,
                "gpus": 0 if instance.gpus is None else len(instance.gpus.names),
                "pid": None if instance.child is None else instance.child.pid,
                **({"failure": instance.failure} if instance.failure else {}),
                **({"start": instance.start} if instance.start else {}),
                **({} if instance.worker is None else instance.worker.status(instance.group_state)),
            }
            for instance in self._instances.values()
        ]

    async def end(self, drain_s: float) -> None:
        """End all instances as ``stop`` does, and read what they still say."""
        children = [instance.child for instance in self._instances.values() if instance.child is not None]
        await asyncio.gather(*(self.stop(instance_id, drain_s) for instance_id in list(self._instances)))
        await asyncio.gather(*(child.read_rest(_LAST_WORDS_S) for child in children))
