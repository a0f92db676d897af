"""A node without Ray. It serves its regions to peers, and fetches models on orders from a control socket.

``python -m benchmarks.cluster.peer_node AGENT_SOCKET CONTROL_SOCKET HOST:PORT TOKEN_FILE [CA CERT KEY]`` prints its
port. It replaces the node server in benchmarks that look only at how weights travel.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from aiohttp import web
from medusa_cluster.connections import require_token
from medusa_cluster.transport.agent_regions import AgentRegions
from medusa_cluster.transport.pacing import Pacer
from medusa_cluster.transport.regions import RegionRoutes
from medusa_runtime.errors import MedusaError
from medusa_runtime.node.client import NodeClient
from medusa_runtime.region.checksummed import ChecksummedRegion
from medusa_runtime.storage.peer_access import PeerAccess

_POLL_S = 0.02
_FETCHED_POLL_S = 0.1  # may be coarse, because the region records when it was complete
_DROPPED_WITHIN_S = 10.0
_READY_WITHIN_S = 10.0


class PeerNode:
    """The orders of the control socket: ``plan``, ``sources``, ``fetch``, ``ready``, ``drop`` and ``pace``.

    ``plan`` sets the sources that ``sources`` returns. ``agent`` is the path of the node agent's socket.
    """

    def __init__(self, agent: str) -> None:
        self._agent = agent
        self._pacer = Pacer()
        self.regions = RegionRoutes(AgentRegions(agent), self._pacer)
        self._sources: list[str] = []
        self._held: dict[str, tuple[NodeClient, ChecksummedRegion]] = {}

    async def answer(
        self,
        op: str,
        url: str = "",
        sources: Sequence[str] = (),
        bytes_per_s: float | None = None,
        again: bool = False,
    ) -> Any:
        if op == "sources":
            return self._sources
        if op == "plan":
            self._sources = list(sources)
        elif op == "pace":
            self._pacer.set(bytes_per_s)
        elif op == "fetch":
            return await asyncio.to_thread(self._fetch, url)
        elif op == "ready":
            await asyncio.to_thread(self._wait_ready)
        elif op == "drop":
            await asyncio.to_thread(self._drop, url)
        return self.regions.sent_bytes

    def _fetch(self, url: str) -> dict[str, Any]:
        """Fetch a model. Return its times and its rate as soon as it is complete."""
        client = NodeClient(self._agent)
        fetched = client.region(url)
        while fetched.progress().state == "fetching":
            time.sleep(_FETCHED_POLL_S)
        # Only now, because a node server does not read the index of a model that it fetches.
        region = ChecksummedRegion(fetched)
        self._held[url] = client, region
        started_ns, first_ns, ended_ns = region.times_ns
        rest_bytes = region.total_bytes - region.chunk_bytes  # the bytes after the first chunk
        return {
            "state": region.state.name,
            "started_s": started_ns / 1e9,
            "first_s": first_ns / 1e9,
            "ended_s": ended_ns / 1e9,
            "bytes_per_s": rest_bytes / max((ended_ns - first_ns) / 1e9, 1e-9),
            "total_bytes": region.total_bytes,
        }

    def _wait_ready(self) -> None:
        """Wait until the agent has memory ready for the next model. It prepares it while nothing is fetched."""
        deadline = time.monotonic() + _READY_WITHIN_S
        client = NodeClient(self._agent)
        try:
            while not client.status()["ready_bytes"] and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        finally:
            client.close()

    def _drop(self, url: str) -> None:
        """Drop a model as soon as no peer reads it."""
        client, region = self._held.pop(url)
        region.close()
        client.close()
        deadline = time.monotonic() + _DROPPED_WITHIN_S
        while time.monotonic() < deadline:
            with suppress(MedusaError):
                client = NodeClient(self._agent)
                try:
                    client.drop(url)
                    return
                finally:
                    client.close()
            time.sleep(_POLL_S)


async def serve(agent: str, control: str, listen: str, access: PeerAccess) -> None:
    """Serve peers on the address ``listen`` and orders on the socket ``control``, until the process ends."""
    node = PeerNode(agent)
    application = web.Application(middlewares=[require_token(access.token)])
    application.add_routes(node.regions.routes())
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    host, _, port = listen.rpartition(":")
    await web.TCPSite(runner, host, int(port), ssl_context=access.server_context()).start()

    async def control_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            try:
                answer = {"ok": await node.answer(**json.loads(line))}
            except MedusaError as error:
                answer = {"error": {"code": error.code, "message": str(error)}}
            writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    await asyncio.start_unix_server(control_connection, control)
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def main(arguments: Sequence[str]) -> None:
    agent, control, listen, *files = arguments
    asyncio.run(serve(agent, control, listen, PeerAccess.of(*files)))


if __name__ == "__main__":
    main(sys.argv[1:])
