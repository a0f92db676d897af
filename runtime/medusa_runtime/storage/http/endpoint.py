"""The address of a web server."""

from __future__ import annotations

import socket
from typing import NamedTuple

# Metadata services of clouds, which give a machine's credentials to every program on it, at other addresses.
_METADATA = ("fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254", "100.100.100.200", "168.63.129.16")


class Endpoint(NamedTuple):
    """A host and port to connect to, with or without TLS."""

    tls: bool
    host: str
    port: int

    @property
    def authority(self) -> str:
        """The value of the Host header, which names the port only if it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == self.standard_port else f"{host}:{self.port}"

    @property
    def standard_port(self) -> int:
        """The scheme's own port: 443 with TLS, or else 80."""
        return 443 if self.tls else 80

    def is_same_host(self, other: Endpoint) -> bool:
        """Return whether both are the same server: the same host, and the same port or each scheme's own."""
        standard = self.port == self.standard_port and other.port == other.standard_port
        return self.host.lower() == other.host.lower() and (self.port == other.port or standard)


def is_link_local(host: str) -> bool:
    """Return whether a host is an address of this link alone, or a cloud's metadata service, which most have there."""
    address = _address(host)
    return address in _METADATA or address.startswith(("169.254.", "fe8", "fe9", "fea", "feb"))


def is_loopback(host: str) -> bool:
    """Return whether an address, or a name without looking it up, is that of this machine for itself."""
    address = _address(host)
    # The unspecified address leads to this machine, too.
    return address in ("::", "::1") or address.startswith(("0.", "127.")) or host.lower().rstrip(".") == "localhost"


def _address(host: str) -> str:
    """Return an address in its usual form, or "" for a name: anybody can have names that begin like an address.

    ``0x7f.1`` and ``2130706433`` are 127.0.0.1 to whatever connects, perhaps a proxy, and so is ``::ffff:7f00:1``.
    """
    try:
        if ":" in host:
            packed = socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
            return socket.inet_ntop(socket.AF_INET6, packed).removeprefix("::ffff:")
        return socket.inet_ntoa(socket.inet_aton(host.rstrip(".")))
    except OSError:
        return ""
