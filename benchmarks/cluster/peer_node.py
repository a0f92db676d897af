"""A node without Ray: its regions for peers, and a control socket that knows where to read models.

``python -m benchmarks.cluster.peer_node AGENT_SOCKET CONTROL_SOCKET HOST:PORT TOKEN_FILE [CA CERT KEY]`` prints its
port. It stands in for the node server where only the way of the weights is looked at. Its control socket answers
``sources``, ``pace`` and ``plan``, with which it is told what to answer to ``sources``.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from medusa_cluster.transport.agent_regions import AgentRegions
from medusa_cluster.transport.auth import require_token
from medusa_cluster.transport.pacing import Pacer
from medusa_cluster.transport.regions import RegionRoutes
from medusa_runtime.storage.peer_access import PeerAccess


async def serve(agent: str, control: str, listen: str, access: PeerAccess) -> None:
    """Serve until the process is ended."""
    pacer, plan = Pacer(), {"sources": list[str]()}
    regions = RegionRoutes(AgentRegions(agent), pacer)
    application = web.Application(middlewares=[require_token(access.token)])
    application.add_routes(regions.routes())
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    host, _, port = listen.rpartition(":")
    site = web.TCPSite(runner, host, int(port), ssl_context=access.server_context())
    await site.start()

    def answer(request: dict[str, Any]) -> Any:
        if request["op"] == "sources":
            return plan["sources"]
        if request["op"] == "plan":
            plan["sources"] = request["sources"]
        if request["op"] == "pace":
            pacer.set(request["bytes_per_s"])
        return regions.sent_bytes

    async def control_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            writer.write(json.dumps({"ok": answer(json.loads(line))}).encode() + b"\n")
        writer.close()

    await asyncio.start_unix_server(control_connection, control)
    assert runner.addresses
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


def main(arguments: Sequence[str]) -> None:
    agent, control, listen, *files = arguments
    asyncio.run(serve(agent, control, listen, PeerAccess.of(*files)))


if __name__ == "__main__":
    main(sys.argv[1:])
