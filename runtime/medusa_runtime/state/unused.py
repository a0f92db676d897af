"""Report a part of a bundle that a start does not use: in one line of the log, and in the timeline."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..timeline import Timeline

logger = logging.getLogger(__name__)

_CHARACTERS = 300


def report_unused(what: str, reason: object, timeline: Timeline, began_ns: int) -> None:
    """Report that ``what`` is not used, and why. The texts may quote the bundle, so control characters are replaced."""
    what, text = _printable(what), _printable(str(reason))
    logger.warning("%s is not used: %s", what, text)
    timeline.record("restore", began_ns, time.monotonic_ns(), artifact=what, left_out=text[:_CHARACTERS])


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text[: 2 * _CHARACTERS])


__all__ = ["report_unused"]
