"""The controller as a detached Ray actor on the head. Ray starts it again when it dies.

Only what Ray must do is here: keep this process running, list the nodes that live, and carry calls to their actors.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from ssl import SSLContext
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout
from medusa_runtime.errors import ClusterError
from medusa_runtime.storage.peer_access import PeerAccess

from ..json_lines import JsonLinesServer
from ..node.actor import NAMESPACE, NodeActor, actor_name
from ..node.ray_processes import CONTROL_SOCKET_VARIABLE, NODE_LABEL, NODE_RESOURCE
from .cluster import Cluster

logger = logging.getLogger(__name__)

CONTROLLER_NAME = "controller"
_HEALTH_S = 1.0


class Controller:
    """Listens on `<dir>/controller.sock` for the head's node server."""

    async def __init__(self) -> None:  # type: ignore[misc]  # Ray awaits it
        logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
        folder = Path(os.environ[CONTROL_SOCKET_VARIABLE]).parent
        self._cluster = Cluster(RayNodes(), folder / "controller.json")
        self._server = JsonLinesServer(folder / "controller.sock", self._cluster.answer)
        await self._server.start()
        self._task = asyncio.create_task(self._cluster.run())

    async def pid(self) -> int:
        return os.getpid()


class RayNodes:
    """The nodes of Ray's cluster, and one actor on each of them that passes calls on."""

    def __init__(self) -> None:
        self._actors: dict[str, Any] = {}
        self._session: ClientSession | None = None
        self._ssl = _client_context(os.environ)
        # ray.nodes() waits while the head's GCS is away.
        self._thread = ThreadPoolExecutor(1, "ray-nodes")

    async def names(self) -> set[str] | None:
        """The names of the nodes that Ray sees alive."""
        import ray

        nodes = await asyncio.get_running_loop().run_in_executor(self._thread, ray.nodes)
        labels = [node.get("Labels") or {} for node in nodes if node.get("Alive")]
        return {found[NODE_LABEL] for found in labels if NODE_LABEL in found}

    async def call(self, node: str, request: dict[str, Any], timeout_s: float) -> Any:
        """Raises ClusterError when the node's actor does not answer, and the error that its node server answered."""
        from ray.exceptions import RayError

        from ..json_lines import result_of

        try:
            actor = await self._actor(node)
            arguments = {name: value for name, value in request.items() if name != "op"}
            method = getattr(actor, request["op"])
            answer = await asyncio.wait_for(_of(method.remote(**arguments)), timeout_s)
        except TimeoutError:
            self._actors.pop(node, None)
            raise ClusterError(f"the node {node} did not answer {request['op']} within {timeout_s:.0f} s") from None
        except RayError as error:
            self._actors.pop(node, None)
            raise ClusterError(f"the actor of the node {node} cannot be reached: {type(error).__name__}") from error
        return result_of(answer)

    async def _actor(self, node: str) -> Any:
        if node not in self._actors:
            self._actors[node] = await asyncio.get_running_loop().run_in_executor(None, _make_actor, node)
        return self._actors[node]

    async def forget(self, node: str) -> None:
        """End the node's actor: Ray would wait for a node of this name for ever."""
        import ray

        def kill() -> None:
            with suppress(ValueError):  # there is none
                ray.kill(ray.get_actor(actor_name(node), NAMESPACE))

        self._actors.pop(node, None)
        await asyncio.get_running_loop().run_in_executor(None, kill)

    async def answers(self, node_url: str) -> bool:
        """Ask the node server itself, without Ray."""
        if self._session is None:
            self._session = ClientSession(timeout=ClientTimeout(total=_HEALTH_S))
        try:
            async with self._session.get(f"{node_url}/healthz", ssl=self._ssl) as answer:
                return answer.status == HTTPStatus.OK
        except (ClientError, OSError, TimeoutError):
            return False

    async def request_more(self, count: int) -> None:
        """Ask Ray's autoscaler, where there is one, for so many nodes beside those there are."""
        import ray
        from ray.autoscaler.sdk import request_resources

        def request() -> None:
            alive = sum(1 for node in ray.nodes() if node.get("Alive"))
            request_resources(bundles=[{NODE_RESOURCE: 1}] * (alive + count if count else 0))

        try:
            await asyncio.get_running_loop().run_in_executor(None, request)
        except Exception as error:
            raise ClusterError(f"Ray's autoscaler could not be asked for nodes: {error}") from error


def _client_context(environ: Mapping[str, str]) -> SSLContext | bool:
    """The certificates that Ray uses are also the node servers'."""
    if environ.get("RAY_USE_TLS") != "1":
        return True
    names = ("RAY_AUTH_TOKEN_PATH", "RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY")
    return PeerAccess.of(*(environ[name] for name in names)).client_context() or True


async def _of(reference: Any) -> Any:
    return await reference


def _make_actor(node: str) -> Any:
    """Find or create a node's actor. It stays on its node: one that is lost waits until a node of this name is back."""
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
