"""Reading environment variables of stores: addresses, and switches such as AWS_NO_SIGN_REQUEST=true."""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import ConfigError
from ..base import redacted
from .store import parse_target

_TRUE = ("1", "true", "yes", "on")


def is_true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() in _TRUE


def checked_endpoint(variable: str, url: str) -> str:
    """Return the URL of a store that a variable names. Raises ConfigError, which shows no password."""
    try:
        parse_target(url)
    except ConfigError:
        shown = redacted(url).rpartition("@")[2]  # without a scheme, redacted finds no password
        raise ConfigError(f"{variable}={shown!r} cannot be used: expected http(s)://host[:port]") from None
    return url
