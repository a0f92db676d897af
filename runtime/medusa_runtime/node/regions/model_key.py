"""What a checkpoint is called between functions and agent, and the open folder that a function sends along."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote, urlsplit

from ...errors import NodeError
from ...storage.base import FSSPEC_EXTRAS, redacted, scheme_of

# The stores that an agent fetches from. fsspec knows many more schemes, and some of them (local, reference, zip,
# simplecache …) read files of the machine they run on.
FETCHED_SCHEMES = frozenset({"http", "https", "s3", *FSSPEC_EXTRAS} - {"memory"})
_ENCODED = re.compile("%([0-9A-Fa-f]{2})")
_UNRESERVED = re.compile("[A-Za-z0-9._~-]")
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}
_LONGEST_CHARACTERS = 4096


def model_key(url: str) -> str:
    """The one name of a checkpoint, so that rules and quotas cannot be passed by spelling it differently.

    NodeError for a local path that is not absolute, a URL that leads upwards, and a scheme that is not fetched.
    """
    if len(url) > _LONGEST_CHARACTERS or not url.isprintable():
        raise NodeError(f"url: expected at most {_LONGEST_CHARACTERS} printable characters, found {url[:80]!a}")
    try:
        url.encode()
        scheme = scheme_of(url)
        if scheme in ("", "file"):
            return _local_key(url)
        return _store_key(url, scheme)
    except ValueError:  # a bracket that opens no address, half of a surrogate pair
        raise NodeError(f"url: expected an absolute path or a URL, found {url[:80]!a}") from None


def _local_key(url: str) -> str:
    path = local_path(url)
    if not path.startswith("/"):
        raise NodeError(f"{url}: expected an absolute path; the agent has another working folder")
    if not path.isprintable():
        raise NodeError(f"{url}: expected a path of printable characters")
    path.encode()
    return os.path.normpath(path).replace("//", "/")


def _store_key(url: str, scheme: str) -> str:
    if scheme not in FETCHED_SCHEMES or "::" in url:
        known = ", ".join(f"{name}://" for name in sorted(FETCHED_SCHEMES))
        raise NodeError(f"{redacted(url)[:200]}: expected an absolute path or one of {known} for the node agent")
    authority, slash, path = url.partition("://")[2].rstrip("/").partition("/")
    if scheme in _DEFAULT_PORTS:
        urlsplit(url).port  # noqa: B018  ValueError for what is no port
        user, at, host = authority.rpartition("@")
        authority = user + at + host.lower().removesuffix(_DEFAULT_PORTS[scheme])
        path = _ENCODED.sub(_decoded, path)
    parts = unquote(path.partition("?")[0]).split("/")
    if not authority or "\\" in url or ".." in unquote(url).split("/") or (slash and {"", ".", ".."} & set(parts)):
        raise NodeError(f"{redacted(url)}: expected a URL without '..', '.', a backslash or empty parts")
    return f"{scheme}://{authority}{slash}{path}"


def _decoded(encoded: re.Match[str]) -> str:
    """RFC 3986, section 6.2.2.2: what needs no encoding is written plainly."""
    character = chr(int(encoded[1], 16))
    return character if _UNRESERVED.fullmatch(character) else encoded[0].upper()


def absolute(url: str) -> str:
    """As seen from another process: a relative path is this one's."""
    return url if scheme_of(url) else os.path.abspath(os.path.expanduser(url))


def local_path(url: str) -> str:
    """The path of a local checkpoint, which may be a ``file://`` URL."""
    return unquote(urlsplit(url).path) if scheme_of(url) else url


def open_folder(key: str) -> int | None:
    """The folder of a local checkpoint (of the one file that it is), opened; None of others, or without the right."""
    if scheme_of(key) not in ("", "file"):
        return None
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    path = local_path(key)
    for folder in (path, os.path.dirname(path)):
        try:
            return os.open(folder, flags)
        except NotADirectoryError:
            continue
        except OSError:
            break
    return None
