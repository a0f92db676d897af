"""The HTTP proxies that the environment names, read as curl and requests read them.

``HTTPS_PROXY`` is for https:// origins and ``HTTP_PROXY`` for http:// ones. ``ALL_PROXY`` is used where that variable
is not set, and ``NO_PROXY`` lists the hosts that are reached directly. Names in lower case win over those in upper
case.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit

from ...errors import ConfigError
from ..base import redacted
from .endpoint import Endpoint
from .fields import basic_authorization

_SEPARATORS = re.compile(r"[,\s]+")  # compiled here, so that the prefetcher, which is forked later, need not do it
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")


class Proxy(NamedTuple):
    """A proxy, the Proxy-Authorization value that it needs, and the variable that names it."""

    endpoint: Endpoint
    authorization: str | None
    variable: str


class Proxies:
    """Chooses the proxy for an origin. A bad variable is an error only for an origin that would use it."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._direct = [entry.lower() for entry in _SEPARATORS.split(self._variable("no_proxy")[1]) if entry]

    def choose(self, endpoint: Endpoint) -> Proxy | None:
        """Return the proxy for this origin; None if it is reached directly. Raises ConfigError for a bad variable."""
        name, value = self._variable("https_proxy" if endpoint.tls else "http_proxy")
        if not value:
            name, value = self._variable("all_proxy")
        if not value or any(_covers(entry, endpoint) for entry in self._direct):
            return None
        return _parse(name, value)

    def _variable(self, name: str) -> tuple[str, str]:
        """Return the variable's name, in the case in which it is set, and its value; empty if it is not set."""
        if name in self._environ:
            return name, self._environ[name].strip()
        upper = name.upper()
        if name == "http_proxy" and "REQUEST_METHOD" in self._environ:
            return upper, ""  # in a CGI script, this variable holds a header that the client has sent ("Proxy:")
        return upper, self._environ.get(upper, "").strip()


def _parse(variable: str, value: str) -> Proxy:
    url = value if "://" in value else f"http://{value}"
    wrong = f"{variable}={redacted(url)}: expected http://[user:password@]host[:port]"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:  # not chained: its text may quote a part of a password
        raise ConfigError(wrong) from None
    if parts.scheme != "http" or not _HOST.fullmatch(host):
        raise ConfigError(f"{wrong}; other kinds of proxies are not supported")
    return Proxy(Endpoint(False, host, 80 if port is None else port), basic_authorization(parts), variable)


def _covers(entry: str, endpoint: Endpoint) -> bool:
    """Return whether an entry of NO_PROXY covers this origin.

    An entry is ``*``, a host, a domain, an address or a block of addresses, and may have a port.
    """
    if entry == "*":
        return True
    host = endpoint.host.lower().rstrip(".")
    if "/" in entry:
        return _in_block(host, entry)
    bracketed = re.fullmatch(r"\[([0-9a-f:.]+)\](?::([0-9]{1,5}))?", entry)
    named = re.fullmatch(r"([^:]+):([0-9]{1,5})", entry)
    if found := bracketed or named:
        entry = found[1]
        if found[2] and int(found[2]) != endpoint.port:
            return False
    domain = entry.strip(".")
    return bool(domain) and (host == domain or host.endswith(f".{domain}"))


def _in_block(host: str, block: str) -> bool:
    import ipaddress  # 5 ms, and only for a block in NO_PROXY

    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(block, strict=False)
    except ValueError:  # the host is a name, which perhaps only the proxy can resolve
        return False
