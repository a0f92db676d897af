"""What an idle engine process is given when a function takes it."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from ...config import Settings
from ...errors import NodeError

# What the function's settings say to others than its engine, secrets, and from whom code is run: the agent decides.
_PRIVATE = {"token", "handler", "host", "port", "platform", "node_socket", "trust_state", "trust_key"}

# The descriptors of a "take" message, in this order.
GIVEN = ("region", "demand", "listener", "timeline", "reports", "lease")


def settings_to_body(settings: Settings) -> dict[str, Any]:
    """What an engine must know of a function's settings."""
    return {name: value for name, value in asdict(settings).items() if name not in _PRIVATE}


def settings_from_body(body: Any) -> Settings:
    """Raises NodeError for what is not ``settings_to_body``'s, such as another version's."""
    known = {field.name for field in fields(Settings)} - _PRIVATE
    if not isinstance(body, dict) or not known.issuperset(body):
        unknown = sorted(set(body) - known) if isinstance(body, dict) else body
        raise NodeError(f"the function's settings cannot be used: found {unknown!r}; expected the same version here")
    return Settings(**body)
