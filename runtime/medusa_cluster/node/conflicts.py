"""Checks that Ray's ports are free on this machine, and that no other node of the cluster has this one's name."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from medusa_runtime.errors import ConfigError, MedusaError

if TYPE_CHECKING:
    from .controller_client import ControllerClient
    from .settings import NodeServerSettings

_RAY_SERVERS = 7  # the first of Ray's ports; workers get others where theirs are taken
_WITHIN_S = 3.0
_POLL_S = 0.2


async def check_ray_ports(settings: NodeServerSettings) -> None:
    """Raise ConfigError if something goes on to listen on a port of Ray's, which would be started again for ever."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + _WITHIN_S  # for what an earlier node server on this machine has left
    for port in range(settings.ray_port + (not settings.is_head), settings.ray_port + _RAY_SERVERS):
        while await _listens(settings.host, port):
            if loop.time() > deadline:
                raise ConfigError(
                    f"--ray-port: expected 40 free ports from {settings.ray_port} on, found {settings.host}:{port} in "
                    "use, perhaps by another node on this machine; choose others"
                )
            await asyncio.sleep(_POLL_S)


async def _listens(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_WITHIN_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # TimeoutError, too
        return False
    writer.close()
    return True


async def check_name(settings: NodeServerSettings, controller: ControllerClient) -> None:
    """Raise ConfigError if another node of the cluster has this node's name, and answers."""
    if settings.head_url is None:
        return
    try:
        async with asyncio.timeout(_WITHIN_S):
            nodes = (await controller.ask_head(settings.head_url, "status", {}))["nodes"]
            others = [item["address"] for item in nodes if item["name"] == settings.name]
            taken = [one for one in others if one != settings.address and await controller.is_node(one, settings.name)]
    except (MedusaError, LookupError, TypeError, TimeoutError):
        return  # the controller is away, as while the head starts
    if taken:
        raise ConfigError(
            f"--name: another node of this cluster is called {settings.name}, at {taken[0]}; expected a name of its own"
        )
