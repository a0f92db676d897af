"""Trust: whose code a start may run. A bundle's compile cache and CUDA graphs are machine code that the engine runs.

Everything else in a bundle is data, which any bundle may bring and which is checked as data. Code is run only from a
place below a prefix that the operator has named (``--trust-state``), from a manifest that is signed with a key that the
operator has named (``--trust-key``), or from a local folder whose manifest only this process's own user can write.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ..config import Settings
from ..errors import MissingPackageError
from ..storage.base import Store, redacted, scheme_of
from ..storage.canonical_urls import canonical_url, is_below
from .bundle.locate import MANIFEST
from .bundle.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Trust:
    """The sources of code that a start trusts.

    ``prefixes`` are folders and URLs, and ``keys`` public keys (``ed25519:<base64>``). ``own_files`` says whether files
    of this process's own user are trusted. In the node agent they are not: there, callers choose which folder is read,
    and the root user of any container has the agent's user id.
    """

    prefixes: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    own_files: bool = True

    @classmethod
    def of(cls, settings: Settings) -> Trust:
        """Return the trust of a function, from its settings ``--trust-state`` and ``--trust-key``."""
        return cls.parse(settings.trust_state, settings.trust_key, own_files=True)

    @classmethod
    def parse(cls, prefixes: str | None, keys: str | None, *, own_files: bool = False) -> Trust:
        """Parse the texts of the two settings. They must have been checked."""
        return cls(tuple(prefixes.split(",") if prefixes else ()), tuple(keys.split(",") if keys else ()), own_files)

    def objection(self, store: Store, prefix: str, text: bytes, manifest: Manifest) -> str | None:
        """Return why code from the bundle at ``prefix`` of ``store`` may not be run; None if it may.

        To trust the manifest is enough: an attacker cannot exchange a blob, since the manifest holds its SHA-256.
        """
        place = place_of(store.url, prefix)
        if place is not None and any(is_below(place, place_of(named) or "") for named in self.prefixes):
            return None
        local = store.local_path(f"{prefix}{MANIFEST}")
        found = _owner_objection(local, text) if self.own_files and local is not None else None
        if self.own_files and local is not None and found is None:
            return None
        doubt = self.signature_objection(manifest)
        if doubt is None:
            return None
        where = redacted(place or store.url)
        reasons = "; ".join(reason for reason in (found, doubt) if reason)
        return (
            f"it is code, and nothing says that code from {where} may run here ({reasons}); to allow it, set "
            f"--trust-state={where.removesuffix('/.medusa')}, or sign the bundle and name the key with --trust-key"
        )

    def signature_objection(self, manifest: Manifest) -> str | None:
        """Return why the manifest is not validly signed with one of ``keys``; None if it is."""
        signature = manifest.signature
        if signature is None:
            return "it is not signed"
        if signature.key not in self.keys:
            return f"it is signed with {signature.key[:60]}, which is not in --trust-key"
        from .bundle.signing import verify

        try:
            good = verify(signature.key, signature.value, signature.message)
        except MissingPackageError as error:
            return str(error)
        return None if good else "its signature is wrong: it was changed after it was signed"


def _owner_objection(path: Path, text: bytes) -> str | None:
    """Return why a local manifest is not this user's own; None if it is.

    The file whose owner is checked must still contain ``text``, which was read before: another user that may write to
    the folder could have replaced the file in between.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with open(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return f"{MANIFEST} is no file"
            if status.st_uid != os.geteuid():
                return f"{MANIFEST} belongs to user {status.st_uid}, this process to user {os.geteuid()}"
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                return f"others than its owner may write to {MANIFEST}: chmod go-w"
            if file.read(len(text) + 1) != text:
                return f"{MANIFEST} changed while it was read"
    except OSError as error:
        return f"{MANIFEST} cannot be looked at: {error.strerror}"
    return None


def place_of(url: str, prefix: str = "") -> str | None:
    """Return the place of ``prefix`` below a URL, to compare places.

    It is a local path without links, or a URL without its query and a web server's user. Returns None for a URL that
    may lead to another place.
    """
    scheme = scheme_of(url)
    if scheme in ("", "file"):
        path = unquote(urlsplit(url).path) if scheme else url
        return os.path.realpath(os.path.join(os.path.expanduser(path), prefix))
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    host = parts.netloc.rpartition("@")[2] if scheme in ("http", "https") else parts.netloc
    return canonical_url(f"{scheme}://{host}{parts.path.rstrip('/')}/{prefix}")


__all__ = ["Trust", "place_of"]
