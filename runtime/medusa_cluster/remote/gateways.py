"""The client of a cluster's gateways. It imports nothing slow, because a cold function waits for it."""

from __future__ import annotations

import http.client
import io
import json
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple, cast
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

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer as Buffer

_CONNECT_S = 5.0
_SILENT_S = 60.0  # a gateway sends a comment into a silent stream every ten seconds
# The head of an answer may take minutes, as for a cold model. A silent gateway is asked meanwhile whether it lives.
_POLL_S = 2.0
_PROBE_S = 2.0
_MOST_FAILURES = 3  # probes in a row
# Probes of the kernel notice a gateway whose machine is gone; a silent stream alone says nothing.
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
        self._probes = {address: _LivenessProbe(address) for address in addresses}
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

    def post(self, path: str, body: Mapping[str, Any], cancelled: threading.Event | None = None) -> Exchange:
        """Send a request, without waiting for its answer. Raises UnreachableError if no gateway accepts it.

        Waiting for the answer raises EngineError within a few seconds once ``cancelled`` is set.
        """
        data = json.dumps(body, separators=(",", ":")).encode()
        reasons = []
        for address in tuple(self._addresses):
            connection = _connection(address)
            try:
                connection.connect()
                for option, value in _KEEPALIVE:
                    connection.sock.setsockopt(socket.IPPROTO_TCP, option, value)
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                connection.sock.settimeout(_SILENT_S)  # one that stands still takes no large body
                connection.request("POST", path, data, self._headers)
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                reasons.append(f"{address.url}: {error or type(error).__name__}")
                self._put_last(address)
                continue
            return Exchange(connection, partial(self._check, address, cancelled))
        raise UnreachableError(f"no gateway of the cluster can be reached ({'; '.join(reasons)})")

    def ask(self, path: str, body: Mapping[str, Any], cancelled: threading.Event | None = None) -> Any:
        """Send a request and return its answer's JSON. Raises what ``Exchange.begin`` does, and UnreachableError.

        If a gateway stands still, the next one gets the request: it has to be one that may run twice. Once
        ``cancelled`` is set, the connection is closed, which ends the work for it, and EngineError is raised.
        """
        left = len(self._addresses)
        while True:
            left -= 1
            exchange = self.post(path, body, cancelled)
            try:
                return json.loads(exchange.begin().read())
            except GatewayHungError as error:
                if not left:
                    raise UnreachableError(str(error)) from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise UnreachableError(f"the gateway's answer broke off ({error or type(error).__name__})") from None
            finally:
                exchange.close()

    def _check(self, address: Address, cancelled: threading.Event | None) -> None:
        """Raise EngineError if a request was cancelled, and GatewayHungError if its gateway hangs.

        A gateway hangs if it has been asked again and again, and has not said that it lives.
        """
        if cancelled is not None and cancelled.is_set():
            raise EngineError("the request was cancelled")
        if not self._probes[address].is_alive():
            self._put_last(address)
            raise GatewayHungError(f"the gateway at {address.url} takes requests and answers none; it may hang")

    def _put_last(self, address: Address) -> None:
        """Try the others first from now on. Several threads come here."""
        self._addresses = [*(other for other in self._addresses if other != address), address]


class GatewayHungError(OSError):
    """A gateway's process does not run, though the kernel still takes connections for it."""


class _LivenessProbe:
    """Whether a gateway says that it lives. All requests that wait for it share the probes."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._probed_at = 0.0
        self._failures = 0

    def is_alive(self) -> bool:
        """Probe it, unless that has just been done. False after several failures in a row."""
        with self._lock:
            if time.monotonic() - self._probed_at > _POLL_S / 2:
                self._failures = 0 if self._answers() else self._failures + 1
                self._probed_at = time.monotonic()
            return self._failures < _MOST_FAILURES

    def _answers(self) -> bool:
        connection = _connection(self._address, _PROBE_S)
        try:
            connection.request("GET", "/livez")
            return connection.getresponse().status < 500
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


class Exchange:
    """A request at a gateway. ``abort`` can be called in any thread."""

    def __init__(self, connection: http.client.HTTPConnection, check: Callable[[], None]) -> None:
        self._connection = connection
        self._socket = connection.sock
        self._socket.settimeout(_POLL_S)
        self._reader = _Reader(self._socket, check)

    def begin(self) -> http.client.HTTPResponse:
        """Wait for the answer's head. Raises the MedusaError that an error's answer means, OSError, HTTPException.

        While nothing comes, GatewayHungError is raised when the gateway stands still.
        """
        response = http.client.HTTPResponse(cast("socket.socket", self._reader), method="POST")
        response.begin()
        if response.status != 200:
            raise _error_from(response.status, response.headers.get("Retry-After"), response.read())
        self._reader.most_silent_s = _SILENT_S
        return response

    def abort(self) -> None:
        hang_up(self._socket)

    def close(self) -> None:
        self._connection.close()


class _Reader(io.RawIOBase):
    """What comes from a gateway. ``check`` is called now and then while nothing does."""

    def __init__(self, connection: socket.socket, check: Callable[[], None]) -> None:
        self._connection = connection
        self._check = check
        self.most_silent_s = math.inf

    def makefile(self, _mode: str) -> io.BufferedReader:
        """Be to ``http.client`` what a socket is."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        silent_since = time.monotonic()
        while True:
            try:
                return self._connection.recv_into(buffer)
            except TimeoutError:
                if time.monotonic() - silent_since > self.most_silent_s:
                    raise
            self._check()


def error_of(value: Any) -> MedusaError:
    """Return the error in an error answer's body, or in a stream's error event."""
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict):
        return EngineError("the gateway answered with an error that cannot be read")
    message, code = str(error.get("message")), error.get("code")
    return OverloadedError(message) if code == "overloaded" else EngineError(message)


def _error_from(status: int, retry_after: str | None, body: bytes) -> MedusaError:
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


def _connection(address: Address, timeout_s: float = _CONNECT_S) -> http.client.HTTPConnection:
    if address.tls:
        return http.client.HTTPSConnection(address.host, address.port, timeout=timeout_s, context=_tls_context())
    return http.client.HTTPConnection(address.host, address.port, timeout=timeout_s)


@cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()  # reads the machine's authorities, which takes tens of milliseconds


def _token(path: str | None) -> str | None:
    if not path:
        return None
    from medusa_runtime.storage.peer_access import read_token

    return read_token(path)
