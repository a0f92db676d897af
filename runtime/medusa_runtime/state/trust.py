"""Trust: whose code a start may run. A bundle's compile cache and CUDA graphs are machine code that the engine runs.

Everything else in a bundle is data, which any bundle may bring and which is checked as data. Code is run only from a
place below a prefix that the operator has named (``--trust-state``), from a manifest that is signed with a key that the
operator has named (``--trust-key``), or from a local one that this process's own user has materialized.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from ..config import Settings
from ..errors import MissingPackageError
from ..storage.base import redacted, scheme_of
from ..storage.canonical_urls import canonical_url, is_below
from .bundle.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Trust:
    """The sources of code that a start trusts.

    ``prefixes`` are folders and URLs, and ``keys`` public keys (``ed25519:<base64>``). ``own_bundles`` says whether
    local bundles that this process's own user has made are trusted. In the node agent they are not: there, callers
    choose which bundle is read.
    """

    prefixes: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    own_bundles: bool = True

    @classmethod
    def of(cls, settings: Settings) -> Trust:
        """Return the trust of a function, from its settings ``--trust-state`` and ``--trust-key``."""
        return cls.parse(settings.trust_state, settings.trust_key, own_bundles=True)

    @classmethod
    def parse(cls, prefixes: str | None, keys: str | None, *, own_bundles: bool = False) -> Trust:
        """Parse the texts of the two settings. They must have been checked."""
        return cls(tuple(prefixes.split(",") if prefixes else ()), tuple(keys.split(",") if keys else ()), own_bundles)

    def objection(self, url: str, prefix: str, manifest: Manifest, *, held: str | None = None) -> str | None:
        """Return why code from the bundle at ``prefix`` of the store ``url`` may not be run; None if it may.

        ``held`` is the place of a local bundle's folder that is held open. Without it, the place of a local bundle
        proves nothing: whoever owns a folder above it can exchange it between this check and the reading.

        To trust the manifest is enough: an attacker cannot exchange a blob, since the manifest holds its SHA-256.
        """
        is_local = scheme_of(url) in ("", "file")
        place = held if is_local else place_of(url, prefix)
        if place is not None and any(is_below(place, place_of(named) or "") for named in self.prefixes):
            return None
        local = self.own_bundles and is_local
        if local and _is_own(manifest):
            return None
        doubt = self.signature_objection(manifest)
        if doubt is None:
            return None
        where = redacted(place or place_of(url, prefix) or url)
        reasons = f"this user has not materialized it on this machine; {doubt}" if local else doubt
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


def _is_own(manifest: Manifest) -> bool:
    """Return whether this process's own user has made the manifest, on this machine."""
    if manifest.mark is None:
        return False
    from .bundle.own_mark import is_own

    return is_own(manifest.mark.value, manifest.mark.message)


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
