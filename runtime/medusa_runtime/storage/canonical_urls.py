"""One spelling for each place in a store, so that a rule about a prefix holds for every way to write a URL."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

from .base import scheme_of

_ENCODED = re.compile("%([0-9A-Fa-f]{2})")
_UNRESERVED = re.compile("[A-Za-z0-9._~-]")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}


def canonical_url(url: str) -> str | None:
    """Return the canonical spelling of a URL or an absolute path; None for one that may lead to another place.

    The scheme and a web server's name are in lower case, without the scheme's own port. Only characters that need it
    are percent-encoded (RFC 3986, section 6.2.2), and there is no slash at the end. Links are not resolved.
    """
    scheme = scheme_of(url)
    try:
        if scheme in ("", "file"):
            path = unquote(urlsplit(url).path) if scheme else url
            return os.path.normpath(path).replace("//", "/") if path.startswith("/") else None
        return _canonical_url(url, scheme)
    except ValueError:  # a bracket that does not begin an address, or a bad port
        return None


def is_below(place: str, prefix: str) -> bool:
    """Return whether a canonical place is ``prefix`` or below it. ``s3://b/team-b`` is not below ``s3://b/team``."""
    named = canonical_url(prefix)
    return named is not None and (place == named or place.startswith(named.rstrip("/") + "/"))


def _canonical_url(url: str, scheme: str) -> str | None:
    authority, slash, path = url.partition("://")[2].rstrip("/").partition("/")
    if scheme in _DEFAULT_PORTS:
        urlsplit(url).port  # noqa: B018  raises ValueError for a bad port
        user, at, host = authority.rpartition("@")
        authority = user + at + host.lower().removesuffix(_DEFAULT_PORTS[scheme])
        path = _ENCODED.sub(_decoded, path)
    parts = unquote(path.partition("?")[0]).split("/")
    if not authority or "\\" in url or "::" in url or ".." in unquote(url).split("/"):
        return None
    if slash and {"", ".", ".."} & set(parts):
        return None
    return f"{scheme}://{authority}{slash}{path}"


def _decoded(encoded: re.Match[str]) -> str:
    character = chr(int(encoded[1], 16))
    return character if _UNRESERVED.fullmatch(character) else encoded[0].upper()
