"""The client of a cluster's gateways. It imports nothing slow, because a cold function waits for it."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from medusa_runtime.config import Settings
from medusa_runtime.errors import (
    ConfigError,
    EngineError,
    ForbiddenError,
    MedusaError,
    ObjectNotFoundError,
    OverloadedError,
    RequestError,
    UnreachableError,
)
from medusa_runtime.process import hang_up

_CONNECT_S = 5.0
_SILENT_S = 60.0  # then a stream is given up; a gateway sends a comment into a silent one every 10 s
# The kernel's keepalive probes notice a gateway whose machine is gone, while a request waits for the answer's head.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))


class Address(NamedTuple):
    """The address at which a gateway listens."""

    tls: bool
    host: str
    port: int

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"


class Gateways:
    """The gateways of a cluster. A request goes to the first one that accepts a connection."""

    def __init__(self, addresses: Sequence[Address], token: str | None) -> None:
        self._addresses = list(addresses)
        self._headers = {"Content-Type": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    @classmethod
    def of(cls, settings: Settings) -> Gateways:
        """Return the gateways that the settings name. Raises ConfigError if they name none."""
        if not settings.cluster:
            raise ConfigError("--engine cluster: expected a gateway's URL as --cluster (MEDUSA_CLUSTER), found none")
        addresses = [_address(part.strip()) for part in settings.cluster.split(",") if part.strip()]
        return cls(addresses, _token(settings.cluster_token_file))

    def post(self, path: str, body: Mapping[str, Any]) -> Exchange:
        """Send a request, without waiting for its answer. Raises UnreachableError if no gateway accepts it."""
        data = json.dumps(body, separators=(",", ":")).encode()
        reasons = []
        for address in tuple(self._addresses):
            connection = _connection(address)
            try:
                connection.connect()
                for option, value in _KEEPALIVE:
                    connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.sock.settimeout(None)
                connection.request("POST", path, data, self._headers)
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                reasons.append(f"{address.url}: {error or type(error).__name__}")
                others = [other for other in self._addresses if other != address]
                self._addresses = [
                    *others,
                    address,
                ]  # try it last from now on; a new list, since several threads use it
                continue
            return Exchange(connection)
        raise UnreachableError(f"no gateway of the cluster can be reached ({'; '.join(reasons)})")

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send a request and return its answer's JSON. Raises UnreachableError, or the error in the answer."""
        exchange = self.post(path, body)
        try:
            return json.loads(exchange.begin().read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UnreachableError(f"the gateway's answer broke off ({error or type(error).__name__})") from None
        finally:
            exchange.close()


class Exchange:
    """A request at a gateway. ``abort`` can be called in any thread."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection
        self._socket = connection.sock

    def begin(self) -> http.client.HTTPResponse:
        """Wait for the answer's head. Raises OSError, HTTPException, and the MedusaError for an error answer."""
        response = self._connection.getresponse()
        if response.status != 200:
            raise _as_error(response.status, response.headers.get("Retry-After"), response.read())
        self._socket.settimeout(_SILENT_S)
        return response

    def abort(self) -> None:
        hang_up(self._socket)

    def close(self) -> None:
        self._connection.close()


def error_of(value: Any) -> MedusaError:
    """Return the error in an error answer's body, or in a stream's error event."""
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict):
        return EngineError("the gateway answered with an error that cannot be read")
    message, code = str(error.get("message")), error.get("code")
    return OverloadedError(message) if code == "overloaded" else EngineError(message)


def _as_error(status: int, retry_after: str | None, body: bytes) -> MedusaError:
    try:
        value = json.loads(body)
        error = value["error"]
        code = error.get("code")
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return EngineError(f"the gateway answered with status {status}, and no error of a gateway's")
    message = str(error_of(value))
    if status == 401:
        return ForbiddenError(f"the gateway refuses the token: {message}")
    if status == 404 and code == "model_not_found":
        return ObjectNotFoundError(f"{message} in this cluster; medusa cluster deploy makes one known")
    if status in (400, 413, 422):
        return RequestError(message)
    if status == 429:
        return OverloadedError(message, float(retry_after) if retry_after and retry_after.isdecimal() else 1.0)
    return EngineError(message)


def _address(url: str) -> Address:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.path not in ("", "/"):
        raise ConfigError(f"--cluster: expected the URL of a gateway such as http://10.0.0.1:8080, found {url!r}")
    tls = parts.scheme == "https"
    return Address(tls, parts.hostname, port or (443 if tls else 80))


def _connection(address: Address) -> http.client.HTTPConnection:
    if address.tls:
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(address.host, address.port, timeout=_CONNECT_S, context=context)
    return http.client.HTTPConnection(address.host, address.port, timeout=_CONNECT_S)


def _token(path: str | None) -> str | None:
    if not path:
        return None
    from medusa_runtime.storage.peer_access import read_token

    return read_token(path)
