"""Certificates that a node makes for itself, from the cluster's token. They need the package cryptography.

The token gives the key of the cluster's certificate authority, so whoever has it can make a certificate that all nodes
accept, and nobody else can. A token that can be guessed gives the authority away: everyone who connects sees a
certificate, and can try tokens on it.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from functools import cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from medusa_runtime.errors import ConfigError

from .settings import TlsFiles, write_private

_DERIVATION = b"medusa cluster: certificate authority 1"
_AUTHORITY, _NODE = "medusa cluster", "medusa node"
# Clocks of nodes may differ, and a node makes its certificate anew at each start.
_FROM, _UNTIL = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31, 23, 59, 59)
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of the curve P-256 (SEC 2)


def write_certificates(token: str, files: TlsFiles, host: str) -> None:
    """Write the authority's certificate, and a new one for ``host`` with its key, for this user alone.

    Raises ConfigError for a ``host`` that no certificate can name.
    """
    files.key.parent.mkdir(exist_ok=True, mode=0o700)
    for path, content in zip(files, _made(token, (host,)), strict=True):
        write_private(path, content)


@cache
def held_certificates(token: str) -> TlsFiles:
    """Return the same for a command, which is asked by nobody. The files are in memory, and for this process alone.

    Raises ConfigError where such files are forbidden.
    """
    paths = []
    for content in _made(token, ()):
        try:
            descriptor = os.memfd_create("medusa-tls")  # open as long as this process
        except OSError as error:
            raise ConfigError(
                f"--tls: expected that memfd_create is allowed, found: {error.strerror}; allow it in the seccomp "
                "profile, or name certificates with --tls-cert, --tls-key and --tls-ca"
            ) from None
        os.write(descriptor, content)
        paths.append(Path(f"/proc/self/fd/{descriptor}"))
    return TlsFiles(*paths)


def _made(token: str, hosts: tuple[str, ...]) -> tuple[bytes, bytes, bytes]:
    """Return a certificate for ``hosts`` (names or addresses) and this machine, its key, and the authority's own."""
    authority, key = _authority_key(token), ec.generate_private_key(ec.SECP256R1())
    certificate = _certificate(_NODE, key, authority, (*hosts, "127.0.0.1", "localhost"))
    return (
        certificate.public_bytes(Encoding.PEM),
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        _certificate(_AUTHORITY, authority, authority).public_bytes(Encoding.PEM),
    )


def _authority_key(token: str) -> ec.EllipticCurvePrivateKey:
    # 16 bytes more than the key has, so that all keys are equally likely (FIPS 186-5, A.2.1).
    drawn = HKDF(hashes.SHA256(), 48, None, _DERIVATION).derive(token.encode())
    return ec.derive_private_key(int.from_bytes(drawn) % (_ORDER - 1) + 1, ec.SECP256R1())


def _certificate(
    name: str, key: ec.EllipticCurvePrivateKey, authority: ec.EllipticCurvePrivateKey, hosts: tuple[str, ...] = ()
) -> x509.Certificate:
    """Return a certificate for ``hosts``, or without any the authority's own."""
    is_authority = not hosts
    usage = x509.KeyUsage(
        digital_signature=not is_authority, key_cert_sign=is_authority, crl_sign=False, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    builder = (
        x509.CertificateBuilder(_named(_AUTHORITY), _named(name), key.public_key(), x509.random_serial_number())
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)
    )
    if hosts:
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        alternatives = x509.SubjectAlternativeName([_alternative(host) for host in dict.fromkeys(hosts)])
        builder = builder.add_extension(both, critical=False).add_extension(alternatives, critical=False)
    return builder.sign(authority, hashes.SHA256())


def _named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not host.isascii():
            raise ConfigError(
                f"--host: expected an address, or a name in ASCII (as xn--…), for a certificate, found {host!r}"
            ) from None
        return x509.DNSName(host)


__all__ = ["held_certificates", "write_certificates"]
