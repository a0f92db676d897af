"""The caller of a request, known by its token. Only requests of one caller share the keys and values of prompts.

How long a first token takes says whether somebody has sent the beginning of a prompt before.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterable

current_caller: contextvars.ContextVar[str | None] = contextvars.ContextVar("current_caller", default=None)
"""A digest of the token of the request for which the user's function runs; None where requests need no token."""


def caller_salt(caller: str | None) -> str | None:
    """Return the ``cache_salt`` of a caller's requests that have no own one."""
    return None if caller is None else f"caller {caller}"


def common_caller(callers: Iterable[str | None]) -> str | None:
    """Return whom a batch of requests shares with: the caller of all of them, or else batches of the same callers."""
    return "+".join(sorted({caller for caller in callers if caller is not None})) or None
