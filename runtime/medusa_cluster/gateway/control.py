"""The gateway's side of the controller: its calls under ``/cluster/`` of the node servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import aiohttp
from medusa_runtime.errors import MedusaError, UnreachableError, from_code

from .routes import Routes, node_server, parse

_CALL_S, _REPORT_S = 10.0, 3.0


class Control(Protocol):
    """What a gateway asks of the controller. Every call raises MedusaError while there is no answer."""

    async def routes(self, version: str, wait_s: float) -> Routes:
        """The routes, as soon as they are others than those of ``version``, or after ``wait_s``."""

    async def report(self, loads: Mapping[str, Mapping[str, float]], version: str) -> Routes | None:
        """Tell what each model has to do, and return the routes; None where they are still those of ``version``."""

    async def status(self) -> dict[str, Any]:
        """The state of the cluster, for people."""


class NodeServers:
    """The controller behind any of several node servers: the one that answered last is asked first."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        urls: Sequence[str],
        headers: Mapping[str, str],
        *,
        name: str,
        url: str,
    ) -> None:
        self._session = session
        self._given = list(urls)
        self._known = list(self._given)
        self._headers = headers
        self._name = name
        self.url = url

    def learn(self, found: Routes) -> None:
        """Also ask the node servers at which instances are, so that the end of one node is no end of control."""
        others = {node_server(instance.url) for instance in found.instances().values()}
        known = [url for url in self._known if url in others or url in self._given]
        self._known = known + [url for url in sorted(filter(None, others)) if url not in known]

    async def routes(self, version: str, wait_s: float) -> Routes:
        answer = await self._call("routes", {"version": version, "wait_s": wait_s}, wait_s + _CALL_S)
        return parse(answer)

    async def report(self, loads: Mapping[str, Mapping[str, float]], version: str) -> Routes | None:
        arguments = {"gateway": self._name, "url": self.url, "loads": loads, "version": version}
        answer = await self._call("report", arguments, _REPORT_S)
        return None if version and answer == {"version": version} else parse(answer)

    async def status(self) -> dict[str, Any]:
        answer = await self._call("status", {}, _CALL_S)
        return answer if isinstance(answer, dict) else {}

    async def _call(self, operation: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        failure: MedusaError = UnreachableError("no node server is known")
        for url in tuple(self._known):
            try:
                return await self._ask(url, operation, arguments, timeout_s)
            except (aiohttp.ClientError, OSError, ValueError) as error:
                failure = UnreachableError(f"the node server {url} does not answer: {error or type(error).__name__}")
            except MedusaError as error:
                failure = error
            if url in self._known:  # ask another one first from now on
                self._known.remove(url)
                self._known.append(url)
        raise failure

    async def _ask(self, url: str, operation: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=3.0)
        async with self._session.post(
            f"{url}/cluster/{operation}", json=arguments, headers=self._headers, timeout=timeout
        ) as response:
            answer = await response.json(content_type=None)
        if isinstance(answer, dict) and "ok" in answer:
            return answer["ok"]
        error = answer.get("error") if isinstance(answer, dict) else None
        if isinstance(error, dict) and isinstance(error.get("code"), str):
            raise from_code(error["code"], str(error.get("message", "")))
        raise UnreachableError(f"the node server {url} answered /cluster/{operation} with status {response.status}")
