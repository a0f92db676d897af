"""A checkpoint's key, which names it between functions and the agent, and the open folder that is sent with it."""

from __future__ import annotations

import os
from urllib.parse import unquote, urlsplit

from ...errors import NodeError
from ...storage.base import STORES, redacted, scheme_of
from ...storage.canonical_urls import canonical_url

# The stores that an agent fetches from. fsspec knows many more schemes, and some of them (local, reference, zip,
# simplecache …) read files of the machine they run on.
FETCHED_SCHEMES = frozenset(STORES) - {"", "file"}
_LONGEST_CHARACTERS = 4096


def model_key(url: str) -> str:
    """Return the canonical name of a checkpoint, so that another spelling cannot evade a rule or a quota.

    Raises NodeError for a local path that is not absolute, a URL that leads upwards, and a scheme that the agent does
    not fetch from.
    """
    if len(url) > _LONGEST_CHARACTERS or not url.isprintable():
        raise NodeError(f"url: expected at most {_LONGEST_CHARACTERS} printable characters, found {url[:80]!a}")
    try:
        url.encode()
        scheme = scheme_of(url)
        if scheme in ("", "file"):
            return _local_key(url)
        return _store_key(url, scheme)
    except ValueError:  # a bracket that does not begin an address, or half of a surrogate pair
        raise NodeError(f"url: expected an absolute path or a URL, found {url[:80]!a}") from None


def _local_key(url: str) -> str:
    path = local_path(url)
    if not path.startswith("/"):
        raise NodeError(f"{url}: expected an absolute path; the agent has another working folder")
    if not path.isprintable():
        raise NodeError(f"{url}: expected a path of printable characters")
    path.encode()
    key = canonical_url(path)
    assert key is not None
    return key


def _store_key(url: str, scheme: str) -> str:
    if scheme not in FETCHED_SCHEMES or "::" in url:
        known = ", ".join(f"{name}://" for name in sorted(FETCHED_SCHEMES))
        raise NodeError(f"{redacted(url)[:200]}: expected an absolute path or one of {known} for the node agent")
    key = canonical_url(url)
    if key is None:
        raise NodeError(f"{redacted(url)}: expected a URL without '..', '.', a backslash or empty parts")
    return key


def absolute(url: str) -> str:
    """Return the URL for another process: a relative path is made absolute."""
    return url if scheme_of(url) else os.path.abspath(os.path.expanduser(url))


def local_path(url: str) -> str:
    """Return the path of a local checkpoint, which may be a ``file://`` URL."""
    return unquote(urlsplit(url).path) if scheme_of(url) else url


def open_folder(key: str) -> int | None:
    """Open the folder of a local checkpoint, or the one that its single file is in.

    Returns None for a checkpoint that is not local, and if the folder cannot be opened.
    """
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
