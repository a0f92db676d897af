"""The controller as a detached Ray actor on the head. Ray starts it again when it dies.

This module has only what needs Ray: keeping the process running, listing the live nodes, and calling their actors.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from aiohttp import ClientError, ClientSession, ClientTimeout
from medusa_runtime.errors import ClusterError
from medusa_runtime.logs import configure_logging, log_to_file
from medusa_runtime.storage.peer_access import PeerAccess, call_failure
from yarl import URL

from ..connections import read_body
from ..json_lines import LONGEST_LINE_BYTES, JsonLinesServer, result_of
from ..node.ray.actor import NAMESPACE, NodeActor, actor_name
from ..node.ray.processes import (
    CONTROL_SOCKET_VARIABLE,
    LEAST_NODES_VARIABLE,
    NODE_LABEL,
    NODE_RESOURCE,
    PORT_LABEL,
)
from .cluster import OPTIONS, Cluster
from .reports import log_sizes, log_text

CONTROLLER_NAME = "controller"
_ACTOR_THREADS = 8  # threads


class Controller:
    """The actor. It listens on ``<dir>/controller.sock`` for the head's node server."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Ray awaits it
        folder = Path(os.environ[CONTROL_SOCKET_VARIABLE]).parent
        configure_logging(os.environ["MEDUSA_LOG_LEVEL"], os.environ["MEDUSA_LOG_FORMAT"])
        log_to_file(folder / "logs" / "controller.log")
        least_nodes = os.environ.get(LEAST_NODES_VARIABLE)
        options = replace(OPTIONS, least_nodes=None if least_nodes is None else int(least_nodes))
        self._cluster = Cluster(RayNodes(), folder / "controller.json", options)
        self._server = JsonLinesServer(folder / "controller.sock", self._cluster.answer)
        await self._server.start()
        self._task = asyncio.create_task(self._cluster.run())

    async def pid(self) -> int:
        return os.getpid()


class RayNodes:
    """The nodes of Ray's cluster, with an actor on each that passes orders on to its node server. See ``Nodes``."""

    def __init__(self) -> None:
        self._actors: dict[str, asyncio.Future[Any]] = {}
        self._access = _access(os.environ)
        self._ssl = self._access.client_context() or True
        self._session: ClientSession | None = None
        # Threads, because ray.nodes() and the search for an actor block while the head's GCS is away.
        self._list_thread = ThreadPoolExecutor(1, "ray-nodes")
        self._actor_threads = ThreadPoolExecutor(_ACTOR_THREADS, "ray-actors")

    async def servers(self) -> dict[str, str] | None:
        """Return the nodes that Ray lists as alive: name → URL of the node server."""
        import ray

        nodes = await asyncio.get_running_loop().run_in_executor(self._list_thread, ray.nodes)
        return dict(_server(node, self._access.tls) for node in nodes if _is_member(node))

    async def status(self, node: str, url: str, timeout_s: float) -> Mapping[str, Any]:
        """Ask a node server for its status over HTTP, without Ray. Raises ClusterError if it does not answer."""
        found = await self._get(f"{url}/status", timeout_s)
        if not isinstance(found, dict) or found.get("name") != node:
            raise ClusterError(f"expected the node {node} at {url}, found {str(found)[:200]}")
        return found

    async def logs(self, node: str, url: str, log: str | None, after: int | None, timeout_s: float) -> Any:
        one = "" if log is None else f"/{quote(log, safe='')}" + ("" if after is None else f"?after={after}")
        found = result_of(await self._get(f"{url}/logs{one}", timeout_s))
        return log_sizes(found, node) if log is None else log_text(found, node, log)

    async def _get(self, url: str, timeout_s: float) -> Any:
        """Return the JSON at a URL of a node server. Raises ClusterError if it does not answer with any."""
        if self._session is None:
            self._session = ClientSession(headers={"Authorization": f"Bearer {self._access.token}"})
        try:
            timeout = ClientTimeout(total=timeout_s)
            async with self._session.get(URL(url, encoded=True), ssl=self._ssl, timeout=timeout) as answer:
                return json.loads(await read_body(answer, LONGEST_LINE_BYTES))
        except (ClientError, OSError, TimeoutError, ValueError, RecursionError) as error:
            raise ClusterError(f"{url} did not answer: {call_failure(error, tls=self._access.tls)}") from None

    async def call(self, node: str, request: dict[str, Any], timeout_s: float) -> Any:
        """Call an operation of a node server through the node's actor.

        Raises ClusterError if the actor does not answer, and the error that the node server answered.
        """
        from ray.exceptions import ActorDiedError, RayError

        arguments = {name: value for name, value in request.items() if name != "op"}
        try:
            async with asyncio.timeout(timeout_s):
                actor = await self._actor(node)
                answer = await getattr(actor, request["op"]).remote(**arguments)
        except TimeoutError:
            raise ClusterError(f"the node {node} did not answer {request['op']} within {timeout_s:.0f} s") from None
        except RayError as error:
            if isinstance(error, ActorDiedError):  # it stays dead; after all other errors Ray restarts the actor
                self._actors.pop(node, None)
            raise ClusterError(f"the actor of the node {node} cannot be reached: {type(error).__name__}") from error
        return result_of(answer)

    async def _actor(self, node: str) -> Any:
        """Return the node's actor. Calls that wait at the same time share one search."""
        found = self._actors.get(node)
        if found is None or (found.done() and (found.cancelled() or found.exception() is not None)):
            found = asyncio.get_running_loop().run_in_executor(self._actor_threads, _make_actor, node)
            self._actors[node] = found
        return await asyncio.shield(found)

    def group_token(self, group: str) -> str:
        """Derive the group's secret from the cluster's, so that a new controller knows it, too."""
        return hmac.digest(self._access.token.encode(), b"group " + group.encode(), "sha256").hex()

    async def forget(self, node: str) -> None:
        """End the node's actor. Otherwise Ray would wait for ever for a node of this name."""
        import ray

        def kill() -> None:
            with suppress(ValueError):  # there is none
                ray.kill(ray.get_actor(actor_name(node), NAMESPACE))

        self._actors.pop(node, None)
        await asyncio.get_running_loop().run_in_executor(self._actor_threads, kill)

    async def request_nodes(self, total: int, gpus: Sequence[int] = ()) -> None:
        """Ask Ray's autoscaler, if there is one, for so many nodes, some with GPUs. Ray keeps the last request."""
        bundles = [{NODE_RESOURCE: 1, "GPU": count} for count in gpus]
        bundles += [{NODE_RESOURCE: 1}] * (total - len(gpus))

        def request() -> None:
            from ray.autoscaler.sdk import request_resources  # a second of imports

            request_resources(bundles=bundles)

        try:
            await asyncio.get_running_loop().run_in_executor(None, request)
        except Exception as error:
            raise ClusterError(f"Ray's autoscaler could not be asked for nodes: {error}") from error


def _access(environ: Mapping[str, str]) -> PeerAccess:
    """Return the token and certificates of the node servers, which are the same as Ray's."""
    names = (
        ("RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY") if environ.get("RAY_USE_TLS") == "1" else ()
    )
    return PeerAccess.of(environ["RAY_AUTH_TOKEN_PATH"], *(environ[name] for name in names))


def _is_member(node: Mapping[str, Any]) -> bool:
    return bool(node.get("Alive")) and {NODE_LABEL, PORT_LABEL} <= (node.get("Labels") or {}).keys()


def _server(node: Mapping[str, Any], tls: bool) -> tuple[str, str]:
    """Return the name and the node server's URL of a node in Ray's list."""
    labels, host = node["Labels"], str(node["NodeManagerAddress"])
    host = f"[{host}]" if ":" in host else host
    return labels[NODE_LABEL], f"{'https' if tls else 'http'}://{host}:{labels[PORT_LABEL]}"


def _make_actor(node: str) -> Any:
    """Find or create a node's actor. It is bound to its node: if the node is lost, it waits until the node is back."""
    import ray

    actor = ray.remote(concurrency_groups={"control": 16, "data": 64})(NodeActor)
    return actor.options(
        name=actor_name(node),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        label_selector={NODE_LABEL: node},
        max_restarts=-1,
        max_task_retries=0,
        num_cpus=0,
    ).remote()
