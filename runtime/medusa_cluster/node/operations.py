"""The operations of a node server's control socket."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from medusa_runtime.errors import ConfigError, NoControllerError, json_excerpt

from ..deployment import Deployment
from .group_worker import GroupWorker, free_port
from .rates import Rates

if TYPE_CHECKING:
    from ..transport.pacing import Pacer
    from ..transport.regions import RegionRoutes
    from .agent import Agent
    from .controller_client import ControllerClient
    from .instances import Instances
    from .settings import NodeServerSettings

_MOST_BYTES_PER_S = 1e15
_SENT = "sent"  # the name of the counter for weights that were sent to peers
_SOURCES_WITHIN_S = 0.4  # the prefetcher waits 0.5 s for our answer


class Operations:
    """The handlers of the control socket. Every operation may be repeated."""

    def __init__(
        self,
        settings: NodeServerSettings,
        agent: Agent,
        instances: Instances,
        controller: ControllerClient,
        peers: RegionRoutes,
        pacer: Pacer,
    ) -> None:
        self._settings = settings
        self._agent = agent
        self._instances = instances
        self._controller = controller
        self._peers = peers
        self._pacer = pacer
        self._rates = Rates()
        self._sources: dict[str, list[str]] = {}  # URL → the sources that came with the last fetch call
        self.draining = False
        self._known: dict[str, Callable[[dict[str, Any]], Awaitable[Any]]] = {
            "status": self._status,
            "describe": self._describe,
            "fetch": self._fetch,
            "drop": self._drop,
            "unpin": self._unpin,
            "sources": self._find_sources,
            "start": self._start,
            "group_port": self._group_port,
            "consolidate": self._consolidate,
            "release": self._release,
            "stop": self._stop,
            "resume": self._resume,
            "pace": self._pace,
            "cluster": self._cluster,
        }

    async def answer(self, request: dict[str, Any]) -> Any:
        """Carry out a request's operation. Raises ConfigError for an unknown operation and for bad arguments."""
        operation = self._known.get(str(request.get("op")))
        if operation is None:
            raise ConfigError(f"op: expected one of {', '.join(self._known)}, found {request.get('op')!r}")
        try:
            return await operation(request)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{request['op']}: a value is missing or of the wrong type: {error}") from error

    async def _status(self, _: dict[str, Any]) -> dict[str, Any]:
        agent = await self._agent.status()
        settings, now = self._settings, time.monotonic()
        models = [self._model(region, now) for region in agent.get("regions", ())]
        self._rates.keep({model["url"] for model in models} | {_SENT})
        fetching = {model["url"] for model in models if model["state"] == "fetching"}
        # Not of a model that is being fetched again, perhaps by the agent for an instance.
        failed = {url: why for url, why in self._agent.failures.items() if url not in fetching}
        for url in failed:
            self._sources.pop(url, None)
        return {
            "name": settings.name,
            "address": settings.address,
            "url": settings.url,
            "leaf": settings.leaf,
            "head": settings.is_head,
            "pid": os.getpid(),
            "state": "draining" if self.draining else "alive",
            "link_bytes_per_s": settings.link_bytes_per_s,
            "egress_bytes_per_s": self._rates.read(_SENT, self._peers.sent_bytes, now),
            "ingress_bytes_per_s": sum(model["bytes_per_s"] for model in models),
            "memory_bytes": agent.get("budget_bytes", 0),
            "memory_used_bytes": agent.get("used_bytes", 0),
            "device_kind": settings.device_kind,
            **self._instances.gpus.status(),
            "pace_bytes_per_s": self._pacer.bytes_per_s,
            "agent": {
                "away": agent.get("away", False),
                "starts": self._agent.starts,
                "engines": agent.get("engines", {}),
            },
            "models": models,
            "failed_fetches": failed,
            "instances": self._instances.status({model["url"]: model["version"] for model in models}),
        }

    def _model(self, region: dict[str, Any], now: float) -> dict[str, Any]:
        url, arriving = region["url"], region["state"] == "fetching"
        found = {name: region[name] for name in ("url", "state", "fetched_bytes", "total_bytes", "pinned", "idle_s")}
        if region["state"] == "done":
            self._sources.pop(url, None)  # a later fetch gets new sources
        sources = region.get("sources") or {}
        return found | {
            "version": region["version"],
            "bytes_per_s": self._rates.read(url, region["fetched_bytes"], now) if arriving else 0.0,
            "sources": self._sources.get(url, []),
            "received_bytes": sources.get("received_bytes") or {},
            "excluded": sources.get("excluded") or {},
        }

    async def _describe(self, request: dict[str, Any]) -> dict[str, Any]:
        from .description import describe  # slow: imports stores and formats

        return await asyncio.to_thread(describe, str(request["url"]))

    async def _fetch(self, request: dict[str, Any]) -> dict[str, Any]:
        if request.get("sources") is not None:  # else the last plan stays; without one, the controller is asked
            self._sources[request["url"]] = [str(source) for source in request["sources"]]
        layers = None if request.get("layers") is None else str(request["layers"])
        pin, version = bool(request.get("pin", False)), str(request.get("version", ""))
        self._agent.fetch(request["url"], pin=pin, version=version, layers=layers)
        return {}

    async def _drop(self, request: dict[str, Any]) -> dict[str, Any]:
        await self._agent.drop(request["url"])
        self._sources.pop(request["url"], None)
        return {}

    async def _unpin(self, request: dict[str, Any]) -> dict[str, Any]:
        await self._agent.unpin(request["url"])
        return {}

    async def _find_sources(self, request: dict[str, Any]) -> list[str]:
        """Return the sources for a model, best first: those of its plan.

        Those that the controller knows are added if there is no plan, or if the request says ``again``, because the
        plan's sources have failed.
        """
        url = str(request["url"])
        planned = self._sources.get(url)
        if planned is not None and not request.get("again"):
            return planned
        try:
            arguments = {"node": self._settings.name, "url": url}
            async with asyncio.timeout(_SOURCES_WITHIN_S):
                found = await self._controller.call("sources", arguments)
        except (NoControllerError, TimeoutError):
            found = []
        return list(dict.fromkeys([*(planned or ()), *map(str, found)]))

    async def _start(self, request: dict[str, Any]) -> dict[str, int]:
        deployment = Deployment.from_json(request["deployment"])
        group = request.get("group")
        worker = None if group is None else GroupWorker.from_json(group, self._settings.host, self._settings.tls)
        needed = request.get("device_bytes", 0)
        if not isinstance(needed, int) or isinstance(needed, bool) or needed < 0:
            raise ConfigError(f"device_bytes: expected a number of bytes, found {json_excerpt(needed)}")
        return {"port": await self._instances.start(str(request["id"]), deployment, worker, needed)}

    async def _group_port(self, _: dict[str, Any]) -> dict[str, int]:
        """Return a port for a group's leader that is free at this moment."""
        return {"port": free_port(self._settings.host)}

    async def _consolidate(self, request: dict[str, Any]) -> dict[str, Any]:
        """Set how many workers of a group become instances. The id is that of the leader's instance."""
        self._instances.consolidate(str(request["id"]), int(request["keep"]))
        return {}

    async def _release(self, request: dict[str, Any]) -> dict[str, Any]:
        """Let an instance that prefills for another one take requests of its own."""
        self._instances.release(str(request["id"]))
        return {}

    async def _stop(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"ended": await self._instances.stop(str(request["id"]), float(request.get("drain_s", 30.0)))}

    async def _resume(self, request: dict[str, Any]) -> dict[str, bool]:
        """Let an instance that drains go on; a node that ends as a whole resumes none."""
        return {"resumed": not self.draining and self._instances.resume(str(request["id"]))}

    async def _pace(self, request: dict[str, Any]) -> dict[str, Any]:
        limit = request["bytes_per_s"]
        if limit is not None and not (isinstance(limit, int | float) and 0 < limit <= _MOST_BYTES_PER_S):
            raise ConfigError(f"pace: expected bytes a second above 0, or null, found {json_excerpt(limit)}")
        self._pacer.set(None if limit is None else float(limit))
        return {}

    async def _cluster(self, request: dict[str, Any]) -> Any:
        return await self._controller.call(str(request["call"]), dict(request.get("arguments") or {}))
