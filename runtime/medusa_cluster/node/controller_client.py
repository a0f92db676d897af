"""The way from a node server to the controller: over a socket on the head, and by the head's node server elsewhere."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector
from medusa_runtime.errors import ClusterError, MedusaError, NoControllerError, UnauthorizedError
from medusa_runtime.storage.peer_access import PeerAccess, call_failure

from ..json_lines import call, result_of
from .settings import NodeServerSettings

LONGEST_WAIT_S = 30.0
_ANSWERS_WITHIN_S = LONGEST_WAIT_S + 10.0


class ControllerClient:
    """A client for the controller's operations, for any node."""

    def __init__(self, settings: NodeServerSettings, access: PeerAccess) -> None:
        self._settings = settings
        self._access = access
        self._session: ClientSession | None = None

    async def call(self, operation: str, arguments: dict[str, Any]) -> Any:
        """Call an operation. Raises NoControllerError while the controller is away, and the error in its answer."""
        if self._settings.head_url is not None:
            return await self.ask_head(self._settings.head_url, operation, arguments)
        request = {"op": operation, "arguments": arguments}
        try:
            async with asyncio.timeout(_ANSWERS_WITHIN_S):
                return await call(self._settings.controller_socket, request)
        except (OSError, TimeoutError):
            raise NoControllerError("the cluster's controller is away; it comes back by itself") from None

    async def ask_head(self, head_url: str, operation: str, arguments: dict[str, Any]) -> Any:
        """Call an operation through a head's node server.

        Raises UnauthorizedError for a wrong token, ClusterError for a server that is no node server, and
        NoControllerError if it cannot be reached.
        """
        url = f"{head_url}/cluster/{operation}"
        try:
            async with self._opened().post(url, json=arguments) as answer:
                if answer.status == 401:
                    raise UnauthorizedError(f"{head_url} refused the token; expected the one in the head's token file")
                return result_of(await answer.json(content_type=None), head_url)
        except MedusaError:
            raise
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise ClusterError(f"{head_url} is no node server: expected JSON from /cluster/{operation}") from None
        except (ClientError, OSError, TimeoutError) as error:
            reason = call_failure(error, tls=self._access.tls)
            raise NoControllerError(f"the head's node server at {head_url} cannot be reached: {reason}") from None

    async def is_node(self, address: str, name: str) -> bool:
        """Return whether the node server of the node of this name answers at HOST:PORT."""
        try:
            async with self._opened().get(f"{self._settings.scheme}://{address}/healthz") as answer:
                return bool(await answer.json() == {"name": name})
        except (ClientError, OSError, TimeoutError, ValueError):
            return False

    def _opened(self) -> ClientSession:
        if self._session is None:
            headers = {"Authorization": f"Bearer {self._access.token}"}
            connector = TCPConnector(ssl=self._access.client_context() or True)
            timeout = ClientTimeout(total=_ANSWERS_WITHIN_S)
            self._session = ClientSession(timeout=timeout, headers=headers, connector=connector)
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
