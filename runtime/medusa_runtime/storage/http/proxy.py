"""The HTTP proxies that the environment names, read as curl and requests read them.

``HTTPS_PROXY`` is for https:// origins, ``HTTP_PROXY`` for http:// ones, ``ALL_PROXY`` for both where the other is not
set; ``NO_PROXY`` lists the hosts that are reached directly. Names in lower case win over those in upper case.
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

_SEPARATORS = re.compile(r"[,\s]+")  # here, so that no prefetcher that is forked later does it
_HOST = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")


class Proxy(NamedTuple):
    """A proxy, the Proxy-Authorization value it wants, and the variable that names it."""

    endpoint: Endpoint
    authorization: str | None
    variable: str


class Proxies:
    """Chooses the proxy of an origin. A variable that cannot be used is an error only where it would be used."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._direct = [entry.lower() for entry in _SEPARATORS.split(self._variable("no_proxy")[1]) if entry]

    def choose(self, endpoint: Endpoint) -> Proxy | None:
        """Return the proxy for this origin, or None where it is reached directly. ConfigError for a bad variable."""
        name, value = self._variable("https_proxy" if endpoint.tls else "http_proxy")
        if not value:
            name, value = self._variable("all_proxy")
        if not value or any(_covers(entry, endpoint) for entry in self._direct):
            return None
        return _parse(name, value)

    def _variable(self, name: str) -> tuple[str, str]:
        """Return the variable's name as it is set, and its value; empty when it is not."""
        if name in self._environ:
            return name, self._environ[name].strip()
        upper = name.upper()
        if name == "http_proxy" and "REQUEST_METHOD" in self._environ:
            return upper, ""  # a CGI script: the client's header "Proxy:" would be this variable
        return upper, self._environ.get(upper, "").strip()


def _parse(variable: str, value: str) -> Proxy:
    url = value if "://" in value else f"http://{value}"
    wrong = f"{variable}={redacted(url)}: expected http://[user:password@]host[:port]"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:  # its text may quote a part of a password
        raise ConfigError(wrong) from None
    if parts.scheme != "http" or not _HOST.fullmatch(host):
        raise ConfigError(f"{wrong}; other kinds of proxies are not supported")
    return Proxy(Endpoint(False, host, 80 if port is None else port), basic_authorization(parts), variable)


def _covers(entry: str, endpoint: Endpoint) -> bool:
    """Return whether an entry of NO_PROXY is this origin:

    *, a host, a domain, an address or a block, perhaps with a port.
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
    except ValueError:  # a name, which only the proxy may be able to resolve
        return False
