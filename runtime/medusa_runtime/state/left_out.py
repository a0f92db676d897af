"""How a start reports what it does not use of a bundle: one line in the log, and in the timeline."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..timeline import Timeline

logger = logging.getLogger(__name__)

_CHARACTERS = 300


def leave_out(what: str, reason: object, timeline: Timeline, began_ns: int) -> None:
    """Report one thing. Texts may quote the bundle, which anybody may have written: control characters are escaped."""
    what, text = _printable(what), _printable(str(reason))
    logger.warning("%s is not used: %s", what, text)
    timeline.record("restore", began_ns, time.monotonic_ns(), artifact=what, left_out=text[:_CHARACTERS])


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text[: 2 * _CHARACTERS])


__all__ = ["leave_out"]
