"""The handover from a function to the idle engine process that it takes: its settings and descriptors."""

from __future__ import annotations

import stat
from dataclasses import asdict, fields
from typing import Any

from ...config import Settings
from ...errors import NodeError
from ...region.seals import seals_of
from ..callers.file_status import file_status

# Settings that do not concern an engine, secrets, and whose code is run, which the agent decides.
_PRIVATE = {"token", "handler", "host", "port", "platform", "node_socket", "trust_state", "trust_key"}

# The descriptors of a "take" message, in this order.
TAKE_DESCRIPTORS = ("region", "demand", "listener", "timeline", "reports", "lease")


def settings_to_body(settings: Settings) -> dict[str, Any]:
    """Return the part of a function's settings that its engine needs."""
    return {name: value for name, value in asdict(settings).items() if name not in _PRIVATE}


def settings_from_body(body: Any) -> Settings:
    """Read what ``settings_to_body`` wrote. Raises NodeError for anything else, such as another version's settings."""
    known = {field.name for field in fields(Settings)} - _PRIVATE
    if not isinstance(body, dict) or not known.issuperset(body):
        unknown = sorted(set(body) - known) if isinstance(body, dict) else body
        raise NodeError(f"the function's settings cannot be used: found {unknown!r}; expected the same version here")
    return Settings(**body)


def check_descriptors(descriptors: list[int]) -> None:
    """Raise NodeError unless these descriptors are of the kinds that a function hands to an engine process.

    The engine process writes to them with the agent's rights.
    """
    if len(descriptors) != len(TAKE_DESCRIPTORS) - 2:
        raise NodeError(f"expected {len(TAKE_DESCRIPTORS) - 2} descriptors, found {len(descriptors)}")
    listener, timeline, reports, lease = descriptors
    expected = ((listener, stat.S_ISSOCK, "socket"), (reports, stat.S_ISFIFO, "pipe"), (lease, stat.S_ISSOCK, "socket"))
    for descriptor, is_kind, kind in expected:
        if not is_kind(file_status(descriptor).mode):
            raise NodeError(f"expected a {kind} among the descriptors for an engine process, found something else")
    try:
        seals_of(timeline)
    except OSError:
        raise NodeError("expected a timeline in shared memory for an engine process, found another file") from None
