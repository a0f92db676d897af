"""The tokens that give access: one from the settings, and those of a file that may change while the server runs."""

from __future__ import annotations

import logging
import os
import threading
import time

from medusa_runtime.errors import ConfigError

logger = logging.getLogger(__name__)

_CHECK_EVERY_S = 1.0


class Tokens:
    """The valid tokens. ``file`` has one on each line; empty lines and those that begin with # do not count.

    The file is read again when it has changed, so tokens are rotated without a restart: add the new one, let clients
    change over, remove the old one. If the changed file cannot be used, that is logged, and the earlier tokens stay.
    """

    def __init__(self, token: str | None, file: str | None) -> None:
        """Read the file. Raises ConfigError if it cannot be used."""
        self._own = () if token is None else (token.encode(),)
        self._path = file
        self._lock = threading.Lock()
        self._checked_at = 0.0
        self._version = (0, 0, 0)
        self._from_file: tuple[bytes, ...] = ()
        if self._path is not None:
            self._version = _file_version(self._path)
            self._from_file = _read(self._path)
            self._checked_at = time.monotonic()

    @property
    def required(self) -> bool:
        """Whether requests need a token."""
        return self._path is not None or bool(self._own)

    def caller(self, authorization: str, key: str = "") -> str | None:
        """Return a digest of the token in one of two headers, Authorization and X-Api-Key; None if none is valid.

        Anthropic's clients send X-Api-Key.
        """
        scheme, _, bearer = authorization.partition(" ")
        for value in (bearer if scheme.lower() == "bearer" else "", key):
            sent = value.strip().encode("latin-1", "replace")
            if self._is_valid(sent):
                import hashlib

                return hashlib.sha256(sent).hexdigest()
        return None

    def _is_valid(self, sent: bytes) -> bool:
        import hmac  # with OpenSSL: 3 ms, and most servers want no token

        # The time does not depend on how much of a token is right. compare_digest refuses text that is not ASCII.
        same = [hmac.compare_digest(sent, token) for token in (*self._own, *self._current())]
        return any(same)

    def _current(self) -> tuple[bytes, ...]:
        path = self._path
        if path is None or time.monotonic() - self._checked_at < _CHECK_EVERY_S:
            return self._from_file
        with self._lock:
            if time.monotonic() - self._checked_at >= _CHECK_EVERY_S:
                self._checked_at = time.monotonic()
                try:
                    version = _file_version(path)
                    if version != self._version:
                        self._version, self._from_file = version, _read(path)
                        logger.warning("%s has changed: %d tokens are valid", path, len(self._from_file))
                except ConfigError as error:
                    self._version = (0, 0, 0)
                    logger.error("%s; the tokens before it stay valid", error)  # noqa: TRY400
        return self._from_file


def _file_version(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _read(path: str) -> tuple[bytes, ...]:
    try:
        with open(path, "rb") as file:
            lines = [line.strip() for line in file.read().splitlines()]
    except OSError as error:
        raise _unreadable(path, error) from None
    tokens = tuple(line for line in lines if line and not line.startswith(b"#"))
    if not tokens or not all(_is_token(token) for token in tokens):
        raise ConfigError(f"--api-key-file={path}: expected a token of printable ASCII without spaces on each line")
    return tokens


def _is_token(line: bytes) -> bool:
    return all(0x21 <= byte <= 0x7E for byte in line)


def _unreadable(path: str, error: OSError) -> ConfigError:
    return ConfigError(f"--api-key-file={path}: expected a file that can be read: {error.strerror}")
