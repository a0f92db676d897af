"""The address of a web server."""

from __future__ import annotations

from typing import NamedTuple


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
