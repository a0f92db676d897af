"""The credentials that the nodes of a cluster show each other: a token and, if configured, certificates."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..errors import ConfigError

if TYPE_CHECKING:
    import ssl

_LEAST_CHARACTERS, _MOST_BYTES = 16, 4096
# The reasons by which versions of OpenSSL report bytes that are no TLS, in a handshake.
_NOT_TLS = ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE", "HTTP_REQUEST")
_OUT_OF_TIME = (9, 10)  # OpenSSL's codes: a certificate is not yet valid, or has expired


@dataclass(frozen=True, slots=True)
class PeerAccess:
    """The cluster's token, and the paths of the files for mutual TLS: all three, or none of them for plain HTTP.

    ``expires_at_s``: when the first of the certificates in these files ends, CAs and those between included, in seconds
    since the epoch. Known if ``of`` has read them.
    """

    token: str = field(repr=False)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    expires_at_s: float | None = None

    @classmethod
    def of(
        cls, token_file: str, ca_file: str | None = None, cert_file: str | None = None, key_file: str | None = None
    ) -> PeerAccess:
        """Read the token and check the certificates.

        Raises ConfigError for a token that other users may read, for files of TLS that cannot be used, and if only some
        of them are given.
        """
        given = [path for path in (ca_file, cert_file, key_file) if path]
        if given and len(given) < 3:
            raise ConfigError(
                "expected all of the cluster's CA, certificate and key for mutual TLS, or none of them; "
                f"found only {', '.join(given)}"
            )
        access = cls(read_token(token_file), ca_file or None, cert_file or None, key_file or None)
        if access.tls:  # so that a bad file fails at start, and not in the first fetch
            return replace(access, expires_at_s=access.try_certificate())
        return access

    @property
    def tls(self) -> bool:
        """Whether nodes speak TLS with each other."""
        return self.cert_file is not None

    def client_context(self) -> ssl.SSLContext | None:
        """Return the context with which a node connects to others; None for plain HTTP."""
        return self._context(server=False) if self.tls else None

    def server_context(self) -> ssl.SSLContext | None:
        """Return the context with which a node listens; it requires a certificate. None for plain HTTP."""
        return self._context(server=True) if self.tls else None

    def try_certificate(self) -> float:
        """Shake hands with ourselves, in memory, and return when the first certificate in our files ends.

        Raises ConfigError if nodes would not accept our certificate.
        """
        import ssl

        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = self._context(server=False)
        client = context.wrap_bio(to_client, to_server)
        ends = [client, self._context(server=True).wrap_bio(to_server, to_client, server_side=True)]
        for _ in range(20):  # half of them are enough
            try:
                ends[0].do_handshake()
                del ends[0]
                if not ends:
                    break
            except ssl.SSLWantReadError:
                ends.reverse()
            except ssl.SSLError as error:
                reason = getattr(error, "verify_message", None) or error.reason
                raise ConfigError(
                    f"{self.cert_file}: expected a certificate of the CA in {self.ca_file}, for servers and clients, "
                    f"which is valid now, found another one: {reason}"
                ) from None

        shown = client.getpeercert() or {}
        assert self.cert_file
        context.load_verify_locations(self.cert_file)  # the CAs between ours and the trusted one are listed, too
        return min(ssl.cert_time_to_seconds(str(one["notAfter"])) for one in (shown, *context.get_ca_certs()))

    def _context(self, *, server: bool) -> ssl.SSLContext:
        import ssl  # 10 ms, and only needed for certificates

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        # The CA is the cluster's own: anything with a certificate from it is a node, whatever its address.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        assert self.ca_file
        assert self.cert_file
        for path in (self.ca_file, self.cert_file, self.key_file or self.cert_file):
            if not os.access(path, os.R_OK):
                raise ConfigError(f"{path}: expected a file in PEM form that user {os.geteuid()} may read, for TLS")
        try:
            context.load_verify_locations(self.ca_file)
            context.load_cert_chain(self.cert_file, self.key_file)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(
                f"{self.ca_file}, {self.cert_file}, {self.key_file}: expected a CA, a certificate and its key in PEM "
                f"form, found something else ({error})"
            ) from None
        return context


def read_token(path: str) -> str:
    """Read the cluster's token from a file.

    Raises ConfigError unless the file belongs to this user or root and only its owner may read it.
    """
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            text = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: expected the cluster's token, found no file to read: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o077 or found.st_uid not in (0, os.geteuid()):
        raise ConfigError(
            f"{path}: expected a file that only user {os.geteuid()} may read, found mode "
            f"{stat.S_IMODE(found.st_mode):o} of user {found.st_uid}; the token in it may be known: make another one, "
            "and chmod 600 its file"
        )
    token = text.decode("ascii", "replace").strip()
    if not _LEAST_CHARACTERS <= len(token) <= _MOST_BYTES or not all("!" <= each <= "~" for each in token):
        raise ConfigError(
            f"{path}: expected a token of at least {_LEAST_CHARACTERS} printable ASCII characters without spaces; "
            "make one with: openssl rand -hex 32"
        )
    return token


def tls_refusal(error: ssl.SSLError, who: str = "node") -> str:
    """Return why a TLS session failed, for the end of a sentence about the other side. ``who`` is this side."""
    import ssl

    reason = error.reason or str(error)
    words = reason.lower().replace("_", " ")
    if reason in _NOT_TLS:
        return f"it does not speak TLS, which this {who}'s certificates ask for"
    if isinstance(error, ssl.SSLCertVerificationError):
        if error.verify_code in _OUT_OF_TIME:
            return f"its {error.verify_message}, by the clock of this machine"
        return f"its certificate is not from the cluster's CA ({error.verify_message})"
    if any(word in reason for word in ("CERTIFICATE", "UNKNOWN_CA", "DECRYPT_ERROR")):
        return f"it does not accept this {who}'s certificate ({words})"
    return f"TLS failed ({words})"


def call_failure(error: Exception, *, tls: bool) -> str:
    """Return why a call to a node server failed, for the end of a sentence. ``tls``: it was made over TLS.

    aiohttp has Python's error in an attribute, and shows an object of ``ssl`` in its own text.
    """
    import ssl

    found = getattr(error, "certificate_error", None) or getattr(error, "os_error", None) or error
    if isinstance(found, ssl.SSLError):
        return f"{tls_refusal(found)}; expected one token, and --tls on every node or on none"
    if not tls and (isinstance(found, ConnectionResetError) or "disconnected" in str(found)):
        return "it closed the connection; if it was started with --tls, this needs --tls, too"
    if type(error).__name__ == "BadStatusLine" or "Bad status line" in str(error):  # of http.client, or in aiohttp's
        return "it does not speak HTTP"
    if isinstance(found, OSError) and found is not error and found.strerror:
        return found.strerror
    return str(error) or type(error).__name__


__all__ = ["PeerAccess", "call_failure", "read_token", "tls_refusal"]
