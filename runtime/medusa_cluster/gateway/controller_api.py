"""The gateway's client for the controller, by the node servers' routes under ``/cluster/``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import aiohttp
from medusa_runtime.errors import ClusterError, MedusaError, UnauthorizedError, UnreachableError

from ..json_lines import result_of
from .routes import Routes, node_server, parse

_CALL_S, _REPORT_S = 10.0, 3.0
_MOST_ASKED = 8  # node servers in one call: while the controller is away, all of them would ask the head's in vain


class ControllerApi(Protocol):
    """The controller's operations that a gateway uses. Every call raises MedusaError if it gets no answer."""

    async def routes(self, version: str, wait_s: float) -> Routes:
        """Return the routes as soon as their version is another than ``version``, or after ``wait_s``."""

    async def report(self, loads: Mapping[str, Mapping[str, float]], version: str) -> Routes | None:
        """Report each model's load. Return the routes, or None if they are still those of ``version``."""

    async def status(self) -> dict[str, Any]:
        """Return the state of the cluster, as it is shown to people."""


class NodeServers:
    """The controller, reached through any of several node servers. The one that answered last is asked first.

    ``name`` and ``url`` are this gateway's, for its reports.
    """

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
        self._configured = list(urls)
        self._urls = list(self._configured)
        self._headers = headers
        self._name = name
        self.url = url

    def learn(self, found: Routes) -> None:
        """Use the node servers of all instances as well, so that the controller stays reachable if a node ends."""
        others = {node_server(instance.url) for instance in found.instances().values()}
        known = [url for url in self._urls if url in others or url in self._configured]
        self._urls = known + [url for url in sorted(filter(None, others)) if url not in known]

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
        for url in tuple(self._urls[:_MOST_ASKED]):
            try:
                return await self._ask(url, operation, arguments, timeout_s)
            except json.JSONDecodeError:
                failure = ClusterError(f"{url} is no node server: expected JSON from /cluster/{operation}")
            except (aiohttp.ClientError, OSError, ValueError) as error:
                failure = UnreachableError(f"the node server {url} does not answer: {error or type(error).__name__}")
            except MedusaError as error:
                failure = error
            if url in self._urls:  # ask another one first from now on
                self._urls.remove(url)
                self._urls.append(url)
        raise failure

    async def _ask(self, url: str, operation: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=3.0)
        async with self._session.post(
            f"{url}/cluster/{operation}", json=arguments, headers=self._headers, timeout=timeout
        ) as response:
            if response.status == 401:
                raise UnauthorizedError(f"{url} refused the token; expected the cluster's, see --token-file")
            answer = await response.json(content_type=None)
        return result_of(answer, url)
