"""The mark of a bundle that this user has materialized on this machine: an HMAC of its manifest.

The key is in a file that only the user can read. Who owns the manifest's file says nothing about its author: a
checkpoint that was downloaded, cloned or unpacked belongs to the user as well.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from ...errors import StateError

_KEY_BYTES = 32
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_PURPOSE = b"medusa own state bundle\n"


def make_mark(message: bytes) -> str:
    """Return the mark of a manifest's message. Makes this user's key if there is none. Raises StateError."""
    path = None
    try:
        path = _key_path()
        if _read_key(path) is None:
            _make_key(path)
        key = _read_key(path)
    except OSError as error:
        raise StateError(f"{path or 'the key of own bundles'} cannot be written: {error.strerror}") from None
    if key is None:
        raise StateError(f"expected a key of this user's in {path}, which nobody else can read; remove the file")
    return _mark(key, message)


def is_own(mark: str, message: bytes) -> bool:
    """Return whether this user has made the mark for this message, on this machine."""
    import hmac  # with OpenSSL: 3 ms, and only bundles with code need it

    try:
        key = _read_key(_key_path())
    except OSError:
        return False
    return key is not None and hmac.compare_digest(_mark(key, message).encode(), mark.encode())


def _mark(key: bytes, message: bytes) -> str:
    import hmac

    return hmac.digest(key, _PURPOSE + message, "sha256").hex()


def _key_path() -> Path:
    folder = os.environ.get("XDG_STATE_HOME", "")
    place = Path(folder) if os.path.isabs(folder) else Path(os.path.expanduser("~/.local/state"))
    if not place.is_absolute():  # without HOME and an entry in passwd; below the working folder may lie anybody's files
        raise FileNotFoundError(errno.ENOENT, "this user has no home folder; expected HOME or XDG_STATE_HOME")
    return place / "medusa" / "bundle.key"


def _read_key(path: Path) -> bytes | None:
    """Return the key; None if there is none, or it may be known to others."""
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        private = found.st_uid == os.geteuid() and not stat.S_IMODE(found.st_mode) & 0o077
        if not (private and stat.S_ISREG(found.st_mode) and found.st_size == _KEY_BYTES):
            return None
        return file.read()


def _make_key(path: Path) -> None:
    """Make the key in one step, unless something is there: two processes may do so at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_KEY_BYTES))
        with suppress(FileExistsError):
            os.link(part, path)
    finally:
        part.unlink(missing_ok=True)


__all__ = ["is_own", "make_mark"]
