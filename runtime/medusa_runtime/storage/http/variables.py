"""Addresses of stores that variables name."""

from __future__ import annotations

from ...errors import ConfigError
from ..base import redacted
from .store import parse_target


def checked_endpoint(variable: str, url: str) -> str:
    """Return the URL of a store that a variable names. Raises ConfigError, which shows no password."""
    try:
        parse_target(url)
    except ConfigError:
        shown = redacted(url).rpartition("@")[2]  # without a scheme, redacted finds no password
        raise ConfigError(f"{variable}={shown!r} cannot be used: expected http(s)://host[:port]") from None
    return url
