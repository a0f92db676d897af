"""Signatures of a bundle's manifest: ed25519, from the ``cryptography`` package.

The package is imported only when a signature is made or checked, because the import takes tens of milliseconds.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigError, MissingPackageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_INSTALL = 'expected the package cryptography, found none; pip install "medusa-runtime[signed]"'
_PREFIX = "ed25519:"


class Signer:
    """A private key. ``public`` is its public key, for ``--trust-key`` of starts that run what was signed with it."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = _PREFIX + base64.b64encode(key.public_key().public_bytes_raw()).decode()

    @classmethod
    def read(cls, path: Path) -> Signer:
        """Read a private key from a PEM file without a password. Raises ConfigError or MissingPackageError."""
        expected = (
            f"--sign={str(path)!r} cannot be used: expected a PEM file with an ed25519 private key without a password "
            f"(openssl genpkey -algorithm ed25519 -out {path.name})"
        )
        try:
            from cryptography.exceptions import UnsupportedAlgorithm
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
            from cryptography.hazmat.primitives.serialization import load_pem_private_key
        except ImportError:
            raise MissingPackageError(f"--sign: {_INSTALL}") from None
        try:
            key = load_pem_private_key(path.read_bytes(), None)
        except OSError as error:
            raise ConfigError(f"{expected}, found none that can be read: {error.strerror}") from None
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise ConfigError(f"{expected}, found something else") from None
        if not isinstance(key, Ed25519PrivateKey):
            raise ConfigError(f"{expected}, found another kind of key")
        return cls(key)

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)


def verify(public: str, signature: bytes, message: bytes) -> bool:
    """Return whether the holder of this public key (``ed25519:<base64>``) signed the message.

    Raises MissingPackageError.
    """
    try:
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError:
        raise MissingPackageError(f"its signature cannot be checked: {_INSTALL}") from None
    key = Ed25519PublicKey.from_public_bytes(base64.b64decode(public.removeprefix(_PREFIX)))
    try:
        key.verify(signature, message)
    except InvalidSignature:
        return False
    return True


__all__ = ["Signer", "verify"]
