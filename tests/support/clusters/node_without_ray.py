"""A node server without Ray, and on the head the controller: what a cluster does, without the seconds that Ray takes.

``python node_without_ray.py NAME FOLDER HOST TOKEN_FILE LINK [HEAD_URL]``. Nodes' folders are neighbours; the
controller reaches a node through the control socket in its folder. ``PREWARM`` and ``MEMORY_BUDGET`` are those of
`medusa node`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from medusa_cluster.controller.cluster import Cluster
from medusa_cluster.json_lines import JsonLinesServer, call
from medusa_cluster.node.agent import Agent
from medusa_cluster.node.controller_client import ControllerClient
from medusa_cluster.node.forwarding import Forwarder
from medusa_cluster.node.gpus import visible_gpus
from medusa_cluster.node.http_server import NodeHttpServer
from medusa_cluster.node.instance_readers import MetricsReader, TimelineReader
from medusa_cluster.node.instances import Instances
from medusa_cluster.node.operations import Operations
from medusa_cluster.node.processes.stopped import StoppedProcesses
from medusa_cluster.node.settings import NodeServerSettings
from medusa_cluster.transport.agent_regions import AgentRegions
from medusa_cluster.transport.pacing import Pacer
from medusa_cluster.transport.regions import RegionRoutes
from medusa_runtime.errors import ClusterError

_POLL_S = 0.5


class Neighbours:
    """The way to the nodes: by the control sockets in their folders."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def servers(self) -> dict[str, str]:
        """The nodes that answer, and where."""
        found = {}
        for path in self._folder.glob("*/control.sock"):
            with suppress(ClusterError):
                found[path.parent.name] = str((await self.status(path.parent.name, "", 3.0))["url"])
        return found

    async def status(self, node: str, _: str, timeout_s: float) -> Any:
        return await self.call(node, {"op": "status"}, timeout_s)

    async def logs(self, node: str, _: str, log: str | None, after: int | None, timeout_s: float) -> Any:
        raise ClusterError(f"the logs of {node} are in its folder")

    async def call(self, node: str, request: dict[str, Any], timeout_s: float) -> Any:
        if request["op"] == "ping":  # for node actors, which are not there
            return {}
        try:
            return await asyncio.wait_for(call(self._folder / node / "control.sock", request), timeout_s)
        except (OSError, TimeoutError) as error:
            raise ClusterError(f"{node}: {error or type(error).__name__}") from error

    async def forget(self, _: str) -> None:
        pass

    def group_token(self, group: str) -> str:
        return f"secret of {group}"

    async def request_nodes(self, _: int, gpus: object = ()) -> None:
        pass


async def end_stopped() -> None:
    """Kill processes that were stopped, as the node server does."""
    stopped = StoppedProcesses()
    while True:
        stopped.check()
        await asyncio.sleep(_POLL_S)


async def run(settings: NodeServerSettings) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    settings.log_folder.mkdir(parents=True, exist_ok=True)
    access, pacer = settings.access(), Pacer()
    line, agent, instances = ControllerClient(settings, access), Agent(settings), Instances(settings)
    peers = RegionRoutes(AgentRegions(str(settings.agent_socket)), pacer)
    operations = Operations(settings, agent, instances, line, peers, pacer)
    listener = NodeHttpServer(settings, access, Forwarder(instances), line, peers.routes())
    control = JsonLinesServer(settings.control_socket, operations.answer)
    works = [TimelineReader(instances).run(), MetricsReader(instances).run(), end_stopped()]
    if settings.is_head:
        cluster = Cluster(Neighbours(settings.folder.parent), settings.folder / "controller.json")
        await JsonLinesServer(settings.controller_socket, cluster.answer).start()
        works.append(cluster.run())
    instances.gpus.begin()
    await listener.start()
    agent.begin()
    await control.start()
    tasks = [asyncio.create_task(work) for work in works]
    print("ready", flush=True)
    await stop.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await instances.end(0.0)
    instances.gpus.close()
    await agent.end()
    await listener.close()


if __name__ == "__main__":
    name, folder, host, token_file, link, *head = sys.argv[1:]
    asyncio.run(
        run(
            NodeServerSettings(
                name,
                Path(folder),
                host,
                Path(token_file),
                head[0] if head else None,
                link_bytes_per_s=float(link),
                prewarm=os.environ.get("PREWARM", "torch=1"),
                memory_budget=os.environ.get("MEMORY_BUDGET"),
                gpus=visible_gpus(os.environ),
            )
        )
    )
