"""Any web server that answers ranges: http:// and https://."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote, urljoin, urlsplit

from ..errors import (
    ConfigError,
    ForbiddenError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
    UnreachableError,
)
from .base import Advance, ObjectInfo, redacted
from .retry import Patience, RetryPolicy, Transient
from .wire import Connection, Endpoint, Response, WireError

_REDIRECTS = (301, 302, 303, 307, 308)
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_MOST_REDIRECTS = 5
# How often progress is told. TLS arrives in pieces of 16 KB, and telling of each took a third of the CPU time.
_STEP_BYTES = 1 << 20
_ERROR_BODY_BYTES = 64 << 10
_CONTROL = frozenset(chr(code) for code in (*range(33), 127))


class Target(NamedTuple):
    """One object's address on the wire."""

    endpoint: Endpoint
    path: str


class HttpStore:
    """A folder on a web server. User and password in the URL become basic authentication; a query goes to each key."""

    refills = True

    def __init__(self, url: str, retries: RetryPolicy | None = None) -> None:
        self.url = url
        self.retries = retries or RetryPolicy()
        self._idle: dict[Endpoint, list[Connection]] = {}
        self._busy: dict[int, Connection] = {}  # by thread
        self._moved: dict[str, Target] = {}  # where redirects led, so that a range costs one round trip
        self._lock = threading.Lock()
        self._closed = False
        self._home, self._query, self._authorization = _home(url)

    def name(self, key: str) -> str:
        """An object's address for messages: nothing secret in it."""
        return f"{redacted(self.url).rstrip('/')}/{key}"

    def target(self, key: str) -> Target:
        path = f"{self._home.path.rstrip('/')}/{quote(key)}"
        return Target(self._home.endpoint, f"{path}?{self._query}" if self._query else path)

    def authorize(self, target: Target, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers that let us in, added to those of the request. Stores that sign override this."""
        if self._authorization and target.endpoint == self._home.endpoint:
            return {**headers, "Authorization": self._authorization}
        return dict(headers)

    def relocate(self, key: str, response: Response) -> bool:
        """Learn from an answer that the object is elsewhere; whether to ask again. For stores with regions."""
        return False

    def stat(self, key: str) -> ObjectInfo:
        return self.read(key, 0, 1)[1]

    def read(self, key: str, start: int, stop: int, version: str | None = None) -> tuple[bytes, ObjectInfo]:
        patience = Patience(self.retries)
        while True:
            try:
                return self._read_once(key, start, stop, version)
            except Transient as cause:
                patience.again(cause)

    def _read_once(self, key: str, start: int, stop: int, version: str | None) -> tuple[bytes, ObjectInfo]:
        connection, response = self._ask(key, start, stop, version)
        try:
            if response.status == 416:
                connection.body(_ERROR_BODY_BYTES)
                text = response.headers.get("content-range", "").rpartition("/")[2]
                size = int(text) if text.isdigit() else 0
                return b"", ObjectInfo(size, _version(response, size))
            if response.status == 206:
                info, _, end = self._ranged(key, start, stop, version, response)
                return self._exactly(connection.body(end - start), end - start), info
            # Servers without ranges are good enough for small objects, which come whole.
            data = connection.body(stop)
            size = len(data) if response.length is None else response.length
            info = ObjectInfo(size, _version(response, size))
            self._same(key, version, info)
            return data[start:stop], info
        except WireError as error:
            connection.close()
            raise Transient(StorageError(f"{self.name(key)}: {error}")) from None
        finally:
            self._give_back(connection)

    @staticmethod
    def _exactly(data: bytes, length: int) -> bytes:
        if len(data) != length:
            raise WireError(f"expected {length} bytes, found {len(data)}")
        return data

    def read_into(
        self,
        key: str,
        start: int,
        buffer: memoryview,
        version: str | None = None,
        advance: Advance | None = None,
        length: int | None = None,
    ) -> None:
        patience = Patience(self.retries)
        stop = start + (len(buffer) if length is None else length)
        filled = 0
        while start + filled < stop:
            connection: Connection | None = None
            begun = filled
            try:
                connection, response = self._ask(key, start + filled, stop, version)
                sent = begun + self._length(key, start + filled, stop, version, response)
                while filled < sent:
                    at = filled % len(buffer)  # the buffer is filled again from its start when the range is longer
                    step = min(filled + min(_STEP_BYTES, len(buffer) - at), sent)
                    while filled < step:
                        count = connection.receive(buffer[at : at + step - filled])
                        filled += count
                        at += count
                    patience.progressed()
                    if advance:
                        advance(filled)
            except WireError as error:
                self._check_interrupted(key, connection)
                if filled > begun:
                    patience.progressed()
                patience.again(Transient(StorageError(f"{self.name(key)}: {error}")))
            except Transient as cause:
                patience.again(cause)
            finally:
                if connection:
                    self._give_back(connection)

    def _length(self, key: str, start: int, stop: int, version: str | None, response: Response) -> int:
        """Bytes of a 206 of the right version that begins at ``start``; it may be shorter than what was asked for."""
        if response.status != 206:
            raise StorageError(
                f"{self.name(key)}: expected 206 and a range, found {response.status}; "
                "this server ignores Range (as python -m http.server does); serve the checkpoint from one that honours "
                "it: nginx, an object store"
            )
        _, first, end = self._ranged(key, start, stop, version, response)
        if response.length != end - first:
            raise Transient(
                StorageError(f"{self.name(key)}: expected {end - first} bytes, the server announces {response.length}")
            )
        return end - first

    def _ranged(
        self, key: str, start: int, stop: int, version: str | None, response: Response
    ) -> tuple[ObjectInfo, int, int]:
        """What a 206 says about the object, and the range [first, end) that it holds."""
        text = response.headers.get("content-range", "")
        unit, _, rest = text.partition(" ")
        bounds, _, size = rest.partition("/")
        first, _, last = bounds.partition("-")
        if unit != "bytes" or not (first.isdigit() and last.isdigit() and size.isdigit()):
            raise StorageError(f"{self.name(key)}: expected Content-Range: bytes {start}-{stop - 1}/…, found {text!r}")
        info = ObjectInfo(int(size), _version(response, int(size)))
        self._same(key, version, info)
        if int(first) != start or not start < int(last) + 1 <= stop:
            raise Transient(
                StorageError(f"{self.name(key)}: asked for bytes {start}-{stop - 1}, the server sends {bounds}")
            )
        return info, int(first), int(last) + 1

    def _same(self, key: str, version: str | None, info: ObjectInfo) -> None:
        if version is not None and info.version != version:
            raise ObjectChangedError(
                f"{self.name(key)} changed while it was read: expected version {version}, "
                f"found {info.version}; start again"
            )

    def _ask(self, key: str, start: int, stop: int, version: str | None) -> tuple[Connection, Response]:
        """A connection whose next bytes are the body of a 200, 206 or 416. Other answers raise."""
        wanted = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity", "User-Agent": "medusa-runtime"}
        wanted |= _conditions(version)
        target = self._moved.get(key) or self.target(key)
        for _ in range(_MOST_REDIRECTS):
            connection, response = self._exchange(key, target, self.authorize(target, wanted))
            if response.status in (200, 206, 416):
                return connection, response
            try:
                body = connection.body(_ERROR_BODY_BYTES)
            except WireError:
                body = b""
                connection.close()
            finally:
                self._give_back(connection)
            if self.relocate(key, response):
                target = self.target(key)
            elif response.status in _REDIRECTS and "location" in response.headers:
                target = self._follow(key, target, response.headers["location"])
                self._moved[key] = target
            elif self._moved.pop(key, None) and response.status in (401, 403, 404, 410):
                target = self.target(key)  # where a redirect led once may expire
            else:
                raise self._refusal(key, response, body)
        raise StorageError(f"{self.name(key)}: more than {_MOST_REDIRECTS} redirects; expected the object")

    def _exchange(self, key: str, target: Target, headers: Mapping[str, str]) -> tuple[Connection, Response]:
        while True:
            connection, used = self._take(key, target.endpoint)
            try:
                return connection, connection.request(target.path, headers)
            except WireError as error:
                connection.close()
                self._give_back(connection)
                self._check_interrupted(key, connection)
                if used:
                    continue  # the server may close an idle connection at any time; that is no failed try
                raise Transient(StorageError(f"{self.name(key)}: {error}")) from None

    def _take(self, key: str, endpoint: Endpoint) -> tuple[Connection, bool]:
        with self._lock:
            idle = self._idle.get(endpoint)
            if idle:
                self._busy[threading.get_ident()] = idle[-1]
                return idle.pop(), True
        try:
            connection = Connection(endpoint, self.retries.stall_s)
        except WireError as error:
            raise Transient(
                UnreachableError(f"{self.name(key)}: cannot reach {endpoint.host} port {endpoint.port}: {error}")
            ) from None
        with self._lock:
            self._busy[threading.get_ident()] = connection
        return connection, False

    def _give_back(self, connection: Connection) -> None:
        with self._lock:
            self._busy.pop(threading.get_ident(), None)
            if self._closed or not connection.reusable:  # a request that nobody needs any more may outlive the store
                connection.close()
                return
            idle = self._idle.setdefault(connection.endpoint, [])
            if connection not in idle:
                idle.append(connection)

    def _follow(self, key: str, target: Target, location: str) -> Target:
        endpoint = target.endpoint
        base = f"{'https' if endpoint.tls else 'http'}://{endpoint.authority}{target.path}"
        moved = _target(urljoin(base, location))
        if endpoint.tls and not moved.endpoint.tls:
            raise StorageError(f"{self.name(key)}: redirected from https to http; expected to stay encrypted")
        return moved

    def _refusal(self, key: str, response: Response, body: bytes) -> Exception:
        status, name = response.status, self.name(key)
        if status == 412:
            return ObjectChangedError(f"{name} changed while it was read (412); start again")
        if status in (404, 410):
            return ObjectNotFoundError(f"{name}: no such {self.missing(body)} ({status}); check the address")
        if status in (401, 403, 407):
            return ForbiddenError(f"{name}: access denied ({status}){self.hint()}")
        if status in _TRANSIENT:
            return Transient(StorageError(f"{name}: the server answers {status}"), _retry_after(response))
        return StorageError(f"{name}: expected 206, found {status} {_first_words(body)}".rstrip())

    def missing(self, body: bytes) -> str:
        """What an answer of 404 or 410 says is not there."""
        return "object"

    def hint(self) -> str:
        """What to do about a refusal."""
        return "; expected an address that may be read, or https://user:password@host/…"

    def interrupt(self, thread: int) -> None:
        with self._lock:
            if connection := self._busy.get(thread):
                connection.interrupt()

    def _check_interrupted(self, key: str, connection: Connection | None) -> None:
        if connection and connection.interrupted:
            raise StorageError(f"{self.name(key)}: interrupted, somebody else has brought this range")

    def local_path(self, key: str) -> Path | None:
        return None

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for idle in self._idle.values():
                for connection in idle:
                    connection.close()
            self._idle.clear()


def _home(url: str) -> tuple[Target, str, str | None]:
    """Where the folder is, the query for each key, and the Authorization header that the URL asks for."""
    parts = urlsplit(url)
    target = _target(url)
    authorization = None
    if parts.username is not None:
        import base64

        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        authorization = "Basic " + base64.b64encode(pair.encode()).decode()
    return target._replace(path=target.path.partition("?")[0]), parts.query, authorization


def _target(url: str) -> Target:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its text may quote a part of a password
        raise ConfigError(f"{redacted(url)}: expected http(s)://host[:port]/path") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or _CONTROL & set(parts.path + parts.query):
        raise ConfigError(f"{redacted(url)}: expected http(s)://host[:port]/path")
    tls = parts.scheme == "https"
    path = quote(parts.path, safe="/%:@!$&'()*+,;=~-._") or "/"
    return Target(
        Endpoint(tls, parts.hostname, port or (443 if tls else 80)), f"{path}?{parts.query}" if parts.query else path
    )


def _version(response: Response, size: int) -> str:
    """The ETag; without one the date of change; without that at least the size."""
    headers = response.headers
    return headers.get("etag") or headers.get("last-modified") or f"size={size}"


def _conditions(version: str | None) -> dict[str, str]:
    if version is None or version.startswith(("W/", "size=")):
        return {}  # weak ETags never satisfy If-Match; each answer's version is compared anyway
    return {"If-Match": version} if version.startswith('"') else {"If-Unmodified-Since": version}


def _retry_after(response: Response) -> float | None:
    text = response.headers.get("retry-after", "")
    if text.isdigit():
        return float(text)
    if not text:
        return None
    import time
    from email.utils import mktime_tz, parsedate_tz  # 20 ms, and dates are rare here

    parsed = parsedate_tz(text)
    return max(mktime_tz(parsed) - time.time(), 0.0) if parsed else None


def _first_words(body: bytes) -> str:
    """The start of an error's text, for a message; tags and line ends dropped."""
    import re

    text = re.sub(r"<[^>]*>|\s+", " ", body[:2000].decode("utf-8", "replace"))
    return f"({' '.join(text.split())[:160]})" if text.strip() else ""
