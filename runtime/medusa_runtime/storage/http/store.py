"""The store for http:// and https://: any web server that honours ranges."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

from ...errors import (
    ConfigError,
    ForbiddenError,
    MedusaError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
    UnreachableError,
)
from ..base import Advance, BucketNotFoundError, ObjectInfo, redacted, require_validator, size_as_version
from ..retry import RetryPolicy, RetryState, TransientError, with_retries
from .endpoint import Endpoint, is_link_local, is_loopback
from .error_body import first_words
from .fields import (
    FieldError,
    basic_authorization,
    content_range,
    entity_tag,
    http_date,
    is_encoded,
    unsatisfied_size,
    wait_s,
)
from .pool import ConnectionPool
from .proxy import Proxies
from .wire import Connection, Response, WireError

_REDIRECTS = (301, 302, 303, 307, 308)
_TRANSIENT = (408, 425, 429, 500, 502, 503, 504)
_MOST_REDIRECTS = 5
# How often progress is reported. After this many bytes: TLS comes in pieces of 16 KB, and to report each one took a
# third of the CPU time. And after this time: peers that wait for a slow store's bytes look whether there are more.
_STEP_BYTES, _STEP_S = 1 << 20, 0.25
_ERROR_BODY_BYTES = 64 << 10
_MOST_SKIPPED_BYTES = 1 << 20  # to skip before ``start``, if a server without ranges sends the whole object
_CONTROL = frozenset(chr(code) for code in (*range(33), 127))
_HOST = re.compile(r"[A-Za-z0-9._~-]+|[0-9A-Fa-f:.]+(?:%[A-Za-z0-9._-]+)?")
# What a URL may hold as it is (RFC 3986); the rest is percent-encoded.
_PATH_SAFE, _QUERY_SAFE = "/%:@!$&'()*+,;=~-._", "/?%:@!$&'()*+,;=~-._"


class Target(NamedTuple):
    """The address of an object: the server, and the path with the query.

    ``region`` is the one that requests are signed for, in stores that have regions.
    """

    endpoint: Endpoint
    path: str
    region: str = ""


class HttpStore:
    """A folder on a web server.

    User and password in the URL become basic authentication, and its query is sent with each key.

    The server is not trusted: what it sends is bounded and parsed strictly (``wire.py``, ``fields.py``), credentials
    are sent only to the URL's own host, and ranges are put together only if a validator (ETag or Last-Modified) shows
    that they are of one version (RFC 9110 §15.3.7.3). Proxy variables are honoured (``proxy.py``).
    """

    reuses_buffer = True
    interruptible = True
    bucket = "bucket"  # what messages call the place in which objects lie

    def __init__(self, url: str, retries: RetryPolicy | None = None, environ: Mapping[str, str] | None = None) -> None:
        self.url = url
        self.retries = retries or RetryPolicy()
        self._proxies = Proxies(os.environ if environ is None else environ)
        self._pool = ConnectionPool()
        self._moved: dict[str, Target] = {}  # by key, where redirects led: later ranges save the round trips
        self._sizes: dict[str, ObjectInfo] = {}  # by key, from the last answer: a date of change has only whole seconds
        self._may_redirect: Callable[[str], bool] | None = None
        self._home, self._query, self._authorization = _home(url)

    def limit_redirects(self, allows: Callable[[str], bool]) -> None:
        """Follow a redirect to another host only if ``allows`` accepts its URL. By default, any host is accepted."""
        self._may_redirect = allows

    def name(self, key: str) -> str:
        """Return an object's address for messages, without secrets."""
        return f"{redacted(self.url).rstrip('/')}/{key}"

    def find_home(self) -> None:
        """Find out where the folder is before the first request. Stores that look that up override this."""

    def target(self, key: str) -> Target:
        path = f"{self._home.path.rstrip('/')}/{quote(key)}"
        return Target(self._home.endpoint, f"{path}?{self._query}" if self._query else path)

    def authorize(self, target: Target, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers with the request's authorization. Stores that sign requests override this."""
        if self._authorization and target.endpoint == self._home.endpoint:
            return {**headers, "Authorization": self._authorization}
        return dict(headers)

    def relocate(self, target: Target, response: Response) -> bool:
        """Adopt another place than ``target`` that a response names, if any, and return whether to ask again there.

        Stores with regions override this.
        """
        return False

    def notice(self, key: str, response: Response) -> None:
        """Look at an answer of the folder's own server before it is used. Stores with revisions override this."""

    def stat(self, key: str) -> ObjectInfo:
        return self.read(key, 0, 1)[1]

    def read(self, key: str, start: int, stop: int, version: str | None = None) -> tuple[bytes, ObjectInfo]:
        return with_retries(self.retries, lambda: self._read_once(key, start, stop, version))

    def _read_once(self, key: str, start: int, stop: int, version: str | None) -> tuple[bytes, ObjectInfo]:
        connection, response = self._ask(key, start, stop, version)
        try:
            if response.status == 416:
                return b"", self._beyond(key, start, response, connection)
            if response.status == 206:
                info, _, end = self._ranged(key, start, stop, version, response)
                return self._exactly(connection.body(end - start), end - start), info
            # Servers without ranges are good enough for small objects, which come whole.
            if start > _MOST_SKIPPED_BYTES:
                raise self._without_ranges(key, response)
            data = connection.body(stop + 1)
            if response.length is None and len(data) > stop:
                raise StorageError(
                    f"{self.name(key)}: the server sends more than {stop} bytes and does not say how many; "
                    f"{self.without_ranges(response)}"
                )
            size = len(data) if response.length is None else response.length
            info = ObjectInfo(size, _version(response, size))
            self._same(key, version, info)
            return data[start:stop], info
        except WireError as error:
            connection.close()
            raise TransientError(StorageError(f"{self.name(key)}: {error}")) from None
        finally:
            self._pool.give_back(connection)

    def _beyond(self, key: str, start: int, response: Response, connection: Connection) -> ObjectInfo:
        """Return what a 416 (range not satisfiable) says about an object that ends at ``start`` or before."""
        connection.body(_ERROR_BODY_BYTES)
        text = response.headers.get("content-range")
        try:
            size = 0 if text is None and not start else unsatisfied_size(text or "")
        except FieldError as error:
            raise StorageError(f"{self.name(key)}: {error} (416)") from None
        if size > start:
            raise StorageError(
                f"{self.name(key)}: the server has no bytes from {start} on, but says that there are {size} (416)"
            )
        return ObjectInfo(size, _version(response, size))

    def _without_ranges(self, key: str, response: Response) -> StorageError:
        return StorageError(
            f"{self.name(key)}: expected 206 and a range, found {response.status}; {self.without_ranges(response)}"
        )

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
        state = RetryState(self.retries)
        stop = start + (len(buffer) if length is None else length)
        filled = 0
        while start + filled < stop:
            connection: Connection | None = None
            counted = filled
            try:
                connection, response = self._ask(key, start + filled, stop, version)
                count, version = self._length(key, start + filled, stop, version, response)
                sent = filled + count
                while filled < sent:
                    at = filled % len(buffer)  # the buffer is filled again from its start when the range is longer
                    step = min(filled + min(_STEP_BYTES, len(buffer) - at), sent)
                    began = time.monotonic()
                    while filled < step and time.monotonic() - began < _STEP_S:
                        count = connection.receive(buffer[at : at + step - filled])
                        filled += count
                        at += count
                    state.progressed(filled - counted)
                    counted = filled
                    if start + filled < stop and state.is_too_slow:
                        raise self._too_slow(key)
                    if advance:
                        began = time.monotonic()
                        advance(filled)
                        state.exclude_pause(time.monotonic() - began)
            except WireError as error:
                self._check_interrupted(key, connection)
                state.progressed(filled - counted)
                state.back_off(TransientError(StorageError(f"{self.name(key)}: {error}")))
            except TransientError as cause:
                state.back_off(cause)
            finally:
                if connection:
                    self._pool.give_back(connection)

    def _too_slow(self, key: str) -> StorageError:
        return StorageError(
            f"{self.name(key)}: too slow: expected at least {self.retries.least_bytes_per_s:g} bytes a second, "
            f"found less for {self.retries.patience_s:g} s"
        )

    def _length(
        self, key: str, start: int, stop: int, version: str | None, response: Response
    ) -> tuple[int, str | None]:
        """Return the length of a 206 that begins at ``start``, and the version that later ranges must have."""
        if response.status != 206:
            raise self._without_ranges(key, response)
        info, first, end = self._ranged(key, start, stop, version, response)
        if response.length is None:
            raise StorageError(f"{self.name(key)}: expected Content-Length in an answer with a range, found none")
        return end - first, info.version

    def _ranged(
        self, key: str, start: int, stop: int, version: str | None, response: Response
    ) -> tuple[ObjectInfo, int, int]:
        """Return what a 206 says about the object, and the range [first, end) that it holds.

        Raises an error if it is not (part of) the range [start, stop) of ``version``.
        """
        try:
            first, end, size = content_range(response.headers.get("content-range", ""))
        except FieldError as error:
            raise StorageError(f"{self.name(key)}: {error}") from None
        info = ObjectInfo(size, _version(response, size))
        self._same(key, version, info)
        if first != start or not start < end <= stop:
            raise TransientError(
                StorageError(
                    f"{self.name(key)}: asked for bytes {start}-{stop - 1}, the server sends {first}-{end - 1}"
                )
            )
        if response.length not in (None, end - first):
            raise TransientError(
                StorageError(f"{self.name(key)}: expected {end - first} bytes, the server announces {response.length}")
            )
        return info, first, end

    def _same(self, key: str, version: str | None, info: ObjectInfo) -> None:
        if version is not None and info.version != version:
            raise ObjectChangedError(
                f"{self.name(key)} changed while it was read: expected version {version!a}, "
                f"found {info.version!a}; start again"
            )
        known = self._sizes.get(key)
        self._sizes[key] = info
        if known is not None and version == known.version and info.size != known.size:
            raise ObjectChangedError(
                f"{self.name(key)} changed while it was read: expected {known.size:,} bytes, found {info.size:,} with "
                f"the same version {version!a}; start again"
            )

    def _ask(self, key: str, start: int, stop: int, version: str | None) -> tuple[Connection, Response]:
        """Request a range, and return a connection whose next bytes are the body of a 200, 206 or 416.

        Redirects are followed. Any other answer raises an error.
        """
        require_validator(self.name(key), version, "ETag nor Last-Modified")
        wanted = {"Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity", "User-Agent": "medusa-runtime"}
        wanted |= _conditions(version)
        self.find_home()
        moved = known = self._moved.get(key)
        target = moved or self.target(key)
        for _ in range(_MOST_REDIRECTS):
            connection, response = self._exchange(key, target, self.authorize(target, wanted))
            if target.endpoint == self._home.endpoint:
                self._notice(key, connection, response)
            if response.status in (200, 206, 416):
                self._check_plain(key, connection, response)
                return connection, response
            try:
                body = connection.body(_ERROR_BODY_BYTES)
            except WireError:
                body = b""
                connection.close()
            finally:
                self._pool.give_back(connection)
            if moved is None and self.relocate(target, response):
                target = self.target(key)
            elif response.status in _REDIRECTS and "location" in response.headers:
                self._moved[key] = target = moved = self._follow(key, target, response.headers["location"])
            else:
                self._moved.pop(key, None)  # the redirect's address may have expired: start at the key's
                if known is None or response.status not in (401, 403, 404, 410):
                    raise self._refusal(key, response, body)
                target, moved, known = self.target(key), None, None
        raise StorageError(f"{self.name(key)}: more than {_MOST_REDIRECTS} redirects; expected the object")

    def _notice(self, key: str, connection: Connection, response: Response) -> None:
        try:
            self.notice(key, response)
        except MedusaError:
            connection.close()
            self._pool.give_back(connection)
            raise

    def _check_plain(self, key: str, connection: Connection, response: Response) -> None:
        encoding = response.headers.get("content-encoding", "")
        if is_encoded(encoding):
            connection.close()
            self._pool.give_back(connection)
            raise StorageError(
                f"{self.name(key)}: the server sends it encoded ({encoding[:60]!r}), expected the bytes as they are; "
                "turn compression off, or upload it without Content-Encoding"
            )

    def _exchange(self, key: str, target: Target, headers: Mapping[str, str]) -> tuple[Connection, Response]:
        while True:
            connection, used = self._pool.take(target.endpoint, partial(self._connect, key, target.endpoint))
            try:
                return connection, connection.request(target.path, headers)
            except WireError as error:
                connection.close()
                self._pool.give_back(connection)
                self._check_interrupted(key, connection)
                if used:
                    continue  # does not count as a try: the server may close an idle connection at any time
                raise TransientError(StorageError(f"{self.name(key)}: {error}")) from None

    def _connect(self, key: str, endpoint: Endpoint) -> Connection:
        proxy = self._proxies.choose(endpoint)
        if proxy is not None:  # which may be on this machine; names are for it to look up
            self._refuse_inside(key, endpoint, endpoint.host)
        try:
            connection = Connection(
                endpoint, self.retries.stall_s, least_bytes_per_s=self.retries.least_bytes_per_s, proxy=proxy
            )
        except WireError as error:
            raise TransientError(
                UnreachableError(
                    f"{self.name(key)}: cannot reach {endpoint.host} port {endpoint.port}: {error}{self.detour()}"
                )
            ) from None
        if proxy is None:
            try:
                self._refuse_inside(key, endpoint, connection.peer_address)
            except ForbiddenError:
                connection.close()
                raise
        return connection

    def _refuse_inside(self, key: str, endpoint: Endpoint, address: str) -> None:
        """Raise ForbiddenError if a name or redirect leads to a service of this machine or link that the URL lacks.

        Such are a cloud's credentials. The server behind the URL must not choose what is read there.
        """
        home = self._home.endpoint
        if is_link_local(address):
            inside = not is_link_local(home.host)
        else:
            inside = is_loopback(address) and not is_loopback(home.host) and not home.is_same_host(endpoint)
        if inside:
            raise ForbiddenError(
                f"{self.name(key)}: led to {address} port {endpoint.port}, which only this machine can reach; expected "
                "another address, or a URL with this one in it"
            )

    def _follow(self, key: str, target: Target, location: str) -> Target:
        endpoint = target.endpoint
        base = f"{'https' if endpoint.tls else 'http'}://{endpoint.authority}{target.path}"
        try:
            moved = parse_target(urljoin(base, location))
        except (ValueError, ConfigError):
            raise StorageError(
                f"{self.name(key)}: redirected to {location.partition('?')[0][:100]!a}; expected http(s)://host/path"
            ) from None
        if endpoint.tls and not moved.endpoint.tls:
            raise StorageError(f"{self.name(key)}: redirected from https to http; expected to stay encrypted")
        if self._may_redirect is not None and not self._home.endpoint.is_same_host(moved.endpoint):
            url = f"{'https' if moved.endpoint.tls else 'http'}://{moved.endpoint.authority}{moved.path}"
            if not self._may_redirect(url):
                raise ForbiddenError(
                    f"{self.name(key)}: redirected to {redacted(url)[:200]}; expected its own host, or a URL below "
                    "a prefix of --allow, because this node agent serves others"
                )
        return moved

    def _refusal(self, key: str, response: Response, body: bytes) -> Exception:
        status, name = response.status, self.name(key)
        if status == 412:
            return ObjectChangedError(f"{name} changed while it was read (412); start again")
        if status in (404, 410):
            kind = BucketNotFoundError if self.lacks_bucket(response, body) else ObjectNotFoundError
            what = self.bucket if kind is BucketNotFoundError else "object"
            return kind(f"{name}: no such {what} ({status}){self.absence(response, body)}")
        if status == 407:
            return ForbiddenError(
                f"{name}: the proxy wants to be authorized (407); expected HTTP_PROXY=http://user:password@host:port"
            )
        if (hint := self.denial(response, body)) is not None:
            return ForbiddenError(f"{name}: access denied ({status}){hint}")
        if status in _TRANSIENT:
            hint = self.higher_limit() if status == 429 else ""
            answered = StorageError(f"{name}: the server answers {status}{hint}")
            return TransientError(answered, wait_s(response.headers, time.time()))
        return StorageError(f"{name}: expected 206, found {status} {first_words(body)}".rstrip())

    def lacks_bucket(self, response: Response, body: bytes) -> bool:
        """Return whether, according to a 404 or 410, not only the object is missing."""
        return False

    def absence(self, response: Response, body: bytes) -> str:
        """Return, for a message, what to do about a 404 or 410."""
        return "; check the address"

    def denial(self, response: Response, body: bytes) -> str | None:
        """Return, for a message, what to do if an answer means that access is denied; None if it does not mean that."""
        if response.status in (401, 403):
            return "; expected an address that may be read, or https://user:password@host/…"
        return None

    def without_ranges(self, response: Response) -> str:
        """Return, for a message, why an answer holds the whole object in place of a range, and what to do."""
        return "this server ignores Range (as python -m http.server does); use nginx or an object store"

    def higher_limit(self) -> str:
        """Return, for a message, how to be allowed more requests than a server's limit (429)."""
        return ""

    def detour(self) -> str:
        """Return, for a message, by which other way a server might be reached."""
        return ""

    def interrupt(self, thread: int) -> None:
        self._pool.interrupt(thread)

    def _check_interrupted(self, key: str, connection: Connection | None) -> None:
        if connection and connection.interrupted:
            raise StorageError(f"{self.name(key)}: interrupted, because another request has brought this range")

    def local_path(self, key: str) -> Path | None:
        return None

    def close(self) -> None:
        self._pool.close()


def _home(url: str) -> tuple[Target, str, str | None]:
    """Return the folder's address, the query to send with each key, and the Authorization value of the URL's user."""
    target = parse_target(url)
    path, _, query = target.path.partition("?")
    return target._replace(path=path), query, basic_authorization(urlsplit(url))


def parse_target(url: str) -> Target:
    """Parse a URL. Raises ConfigError if it is not http(s) or has no usable host."""
    wrong = ConfigError(f"{redacted(url)}: expected http(s)://host[:port]/path")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host = host if host.isascii() else host.encode("idna").decode()
    except ValueError:  # not chained: its text may quote a part of a password
        raise wrong from None
    if parts.scheme not in ("http", "https") or not _HOST.fullmatch(host) or _CONTROL & set(parts.path + parts.query):
        raise wrong
    tls = parts.scheme == "https"
    try:
        path, query = quote(parts.path, safe=_PATH_SAFE) or "/", quote(parts.query, safe=_QUERY_SAFE)
    except UnicodeEncodeError:  # a lone surrogate
        raise wrong from None
    return Target(Endpoint(tls, host, port or (443 if tls else 80)), f"{path}?{query}" if query else path)


def _version(response: Response, size: int) -> str:
    """Return the ETag, or else the date of change, or else the size, which does not reveal every replacement."""
    etag = entity_tag(response.headers.get("etag", ""))
    return etag or http_date(response.headers.get("last-modified", "")) or size_as_version(size)


def _conditions(version: str | None) -> dict[str, str]:
    if version is None or version.startswith("W/"):
        return {}  # weak ETags never satisfy If-Match; each answer's version is compared anyway
    return {"If-Match": version} if version.startswith('"') else {"If-Unmodified-Since": version}
