"""The salt of a request, from its field or its token. Only requests with the same one share keys and values."""

from __future__ import annotations

from flask import request

from ..caller import caller_salt
from ..faults import invalid
from ..http.environ import CALLER
from .body.parameters import Body

_MOST_CHARACTERS = 1024


def cache_salt(body: Body) -> str | None:
    """Return a request's own salt, or its caller's; None where requests need no token. Raises ApiError 400."""
    given = body.get("cache_salt")
    if given is None:
        return caller_salt(request.environ.get(CALLER))
    if not isinstance(given, str) or not 1 <= len(given) <= _MOST_CHARACTERS:
        raise invalid("cache_salt", f"a text of 1 to {_MOST_CHARACTERS} characters", given)
    return f"salt {given}"
