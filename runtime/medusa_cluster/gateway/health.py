"""The watch over instances that neither answer nor end: stopped or hung processes, nodes whose link was cut."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import aiohttp

from .dispatch import Dispatch
from .routes import Instance

logger = logging.getLogger(__name__)

_PROBE_EVERY_S = 1.0
_PROBE_S = 2.0
_MOST_FAILURES = 3  # probes in a row


class InstanceLostError(Exception):
    """An instance was lost. ``began``: whether it may have begun to work on the request."""

    def __init__(self, reason: str, *, began: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.began = began


class Health:
    """Probes of the instances that owe an answer and are silent. Lost ones are probed until they answer again."""

    def __init__(self, session: aiohttp.ClientSession, headers: Mapping[str, str], dispatch: Dispatch) -> None:
        self._session = session
        self._headers = headers
        self._dispatch = dispatch
        self._last_bytes_at: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._lost: dict[str, Instance] = {}
        self._scopes: dict[str, set[asyncio.Timeout]] = {}
        self._probes: dict[str, asyncio.Task[None]] = {}

    def note_bytes(self, instance_id: str) -> None:
        """Note that bytes came from an instance."""
        self._last_bytes_at[instance_id] = time.monotonic()
        self._failures.pop(instance_id, None)

    @asynccontextmanager
    async def watch(self, instance: Instance) -> AsyncIterator[None]:
        """Run a block that waits for an instance. Raises InstanceLostError if the instance is lost meanwhile."""
        if instance.id in self._lost:
            raise InstanceLostError("it does not answer", began=True)
        self._last_bytes_at.setdefault(instance.id, time.monotonic())
        scopes = self._scopes.setdefault(instance.id, set())
        scope = asyncio.timeout(None)
        try:
            async with scope:
                scopes.add(scope)
                yield
        except TimeoutError:
            if scope.expired():
                raise InstanceLostError("it does not answer", began=True) from None
            raise
        finally:
            scopes.discard(scope)

    async def run(self) -> None:
        """Probe until cancelled."""
        try:
            while True:
                await asyncio.sleep(_PROBE_EVERY_S)
                self._start_probes()
        finally:
            for probe in self._probes.values():
                probe.cancel()

    def _start_probes(self) -> None:
        silent_since = time.monotonic() - _PROBE_EVERY_S
        busy = {instance.id: instance for instance in self._dispatch.busy()}
        for key in set(self._lost) - set(self._dispatch.instances):
            del self._lost[key]
            self._dispatch.set_lost(key, False)  # it may come back with its node while it still has a request
        for key in set(self._last_bytes_at) - set(busy) - set(self._lost):
            self._last_bytes_at.pop(key)
        # A probe may end, and a request leave its block, only after the instance was forgotten here.
        for key in self._failures.keys() - busy.keys() - self._lost.keys():
            del self._failures[key]
        for key in [key for key, scopes in self._scopes.items() if not scopes and key not in self._last_bytes_at]:
            del self._scopes[key]
        for key, instance in {**busy, **self._lost}.items():
            if key not in self._probes and (key in self._lost or self._last_bytes_at.get(key, 0.0) < silent_since):
                self._probes[key] = asyncio.create_task(self._probe(instance))

    async def _probe(self, instance: Instance) -> None:
        try:
            good = await self._answers(instance)
        finally:
            self._probes.pop(instance.id, None)
        if good:
            self._failures.pop(instance.id, None)
            if self._lost.pop(instance.id, None) is not None:
                self._dispatch.set_lost(instance.id, False)
            return
        self._failures[instance.id] = self._failures.get(instance.id, 0) + 1
        # If the controller has given up the instance already, one failed probe is enough.
        most = _MOST_FAILURES if instance.id in self._dispatch.instances else 1
        if self._failures[instance.id] >= most and instance.id not in self._lost:
            self._lose(instance)

    def _lose(self, instance: Instance) -> None:
        logger.warning("instance %s on %s does not answer; its requests go elsewhere", instance.id, instance.node)
        self._lost[instance.id] = instance
        self._dispatch.set_lost(instance.id, True)
        for scope in tuple(self._scopes.get(instance.id, ())):
            scope.reschedule(asyncio.get_running_loop().time())

    async def _answers(self, instance: Instance) -> bool:
        """Return whether the instance answers a probe and none of its processes hangs. It may still be starting."""
        try:
            async with self._session.get(
                f"{instance.url}/readyz", headers=self._headers, timeout=aiohttp.ClientTimeout(total=_PROBE_S)
            ) as response:
                body = await response.read()
        except (aiohttp.ClientError, OSError):
            return False
        return response.status not in (404, 502, 504) and b'"hung"' not in body
