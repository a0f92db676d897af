"""A gateway: its settings, and its parts put together."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from medusa_runtime.errors import MedusaError
from medusa_runtime.prometheus import expiration, gauge
from medusa_runtime.storage.peer_access import PeerAccess

from .answer_memory import AnswerMemory, default_total_bytes
from .controller_api import ControllerApi, NodeServers
from .dispatch import Dispatch
from .health import Health
from .metrics import Metrics
from .relay import Relay
from .route_table import ModelLoads, RouteTable
from .routes import Routes

_STATUS_S = 0.5  # how long the controller's status is kept before it is asked for again


@dataclass(frozen=True, slots=True)
class GatewayOptions:
    """The settings of a gateway.

    ``addresses`` are node servers as ``host:port``, and ``client_token`` is the token that clients must send, if any.
    ``hold_s`` is how long a request may wait for an instance, and ``max_waiting`` how many may wait.
    ``body_memory_mb`` limits the bodies of all requests in flight together, and ``answer_memory_mb`` the answers that
    are held; None: a part of the memory that is available.
    """

    addresses: tuple[str, ...]
    access: PeerAccess
    host: str = "0.0.0.0"
    port: int = 8080
    client_token: str | None = field(default=None, repr=False)
    max_waiting: int = 2048
    hold_s: float = 600.0
    drain_s: float = 30.0
    max_body_mb: int = 32
    body_memory_mb: int = 512
    answer_memory_mb: int | None = None
    read_timeout_s: float = 60.0
    write_timeout_s: float = 60.0
    name: str = ""
    access_log: str = "off"  # or text, json
    traces: str = "off"  # or otlp

    @property
    def max_body_bytes(self) -> int:
        return self.max_body_mb * 10**6


class Gateway:
    """A gateway's parts. Use it in one event loop only. ``url`` is the gateway's own, for its reports."""

    def __init__(self, options: GatewayOptions, session: aiohttp.ClientSession, url: str) -> None:
        self.options = options
        self.metrics = Metrics()
        headers = {"Authorization": f"Bearer {options.access.token}"}
        name = options.name or f"{socket.gethostname()}-{os.getpid()}"
        scheme = "https" if options.access.tls else "http"
        urls = [f"{scheme}://{address}" for address in options.addresses]
        self._servers = NodeServers(session, urls, headers, name=name, url=url)
        self.controller: ControllerApi = self._servers
        self.table = RouteTable(self.controller, self._use)
        self.dispatch = Dispatch(options.max_waiting, self.metrics, self.table.wake)
        self._health = Health(session, headers, self.dispatch)
        self.relay = Relay(session, headers, self.dispatch, self._health, self.metrics, options.hold_s)
        given_mb = options.answer_memory_mb
        self.answers = AnswerMemory(default_total_bytes() if given_mb is None else given_mb * 10**6)
        self._status: dict[str, Any] = {}
        self._status_at = 0.0
        self._asking: asyncio.Lock = asyncio.Lock()

    async def run(self) -> None:
        """Follow the controller and watch the instances, until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.table.follow())
            group.create_task(self.table.report(self.loads))
            group.create_task(self._health.run())

    def _use(self, routes: Routes) -> None:
        self._servers.learn(routes)
        self.dispatch.update(routes)
        self.metrics.forget(set(routes.models))

    def loads(self) -> ModelLoads:
        """Return each model's load at this gateway, for the controller."""
        gauges = self.dispatch.gauges()
        return {
            name: {
                "waiting": gauges["waiting"][name],
                "running": gauges["running"][name],
                "longest_wait_s": round(self.dispatch.longest_wait_s(name), 1) if gauges["waiting"][name] else 0.0,
                "tokens_per_s": self.metrics.of(name).arrived.per_s(),
                "unanswered_tokens": self.metrics.of(name).unanswered_tokens,
                "prefilled_per_s": self.metrics.of(name).prefilled.per_s(),
                "decoded_per_s": self.metrics.of(name).token_rate.per_s(),
            }
            for name in self.table.current.models
        }

    def metrics_text(self) -> str:
        gauges = dict(self.dispatch.gauges())
        gauges["tokens_per_second"] = {
            name: self.metrics.of(name).token_rate.per_s() for name in self.table.current.models
        }
        lines = [
            *gauge(
                "medusa_gateway_controller_away_seconds",
                "For how long the controller has not answered.",
                ((), round(self.table.away_s, 1)),
            ),
            *gauge(
                "medusa_gateway_answer_memory_bytes",
                "What answers take that are held until their clients have them.",
                ((), self.answers.used_bytes),
            ),
            *expiration("medusa_gateway", self.options.access.expires_at_s),
        ]
        return self.metrics.text(gauges) + "\n".join(lines) + "\n"

    async def status(self) -> dict[str, Any]:
        """Return the cluster's state as the controller sees it, and for how long the controller has been away.

        While the controller is away, its last status is returned.
        """
        async with self._asking:
            if time.monotonic() - self._status_at > _STATUS_S:
                with suppress(MedusaError):
                    self._status = await self.controller.status()
                self._status_at = time.monotonic()
        return self._status | {"controller_away_s": round(self.table.away_s, 1)}
