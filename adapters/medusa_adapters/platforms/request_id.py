"""The id that a platform gives to a request, in a header of its own."""

from __future__ import annotations

from collections.abc import Mapping

_MAX_CHARACTERS = 128


def request_id(headers: Mapping[str, str], name: str) -> str | None:
    """Return the id in the header ``name``; None if it is missing, too long, or not printable ASCII."""
    value = headers.get(name, "")
    return value if value.isascii() and value.isprintable() and 0 < len(value) <= _MAX_CHARACTERS else None
