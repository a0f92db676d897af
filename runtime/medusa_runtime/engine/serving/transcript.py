"""The text of a sequence as the caller gets it: up to a stop string, and never a part of one."""

from __future__ import annotations

from collections.abc import Iterable

from .detokenizer import Detokenizer


class Transcript:
    """Turns tokens into text that can be sent, and holds back text that may be the beginning of a stop string.

    Without a detokenizer the text is always empty. ``stopped_by`` is the stop string that was reached.
    """

    def __init__(self, detokenizer: Detokenizer | None, stop: Iterable[str], *, include_stop: bool) -> None:
        self._detokenizer = detokenizer
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Add a token, and return the text that can be sent now. Sets ``stopped_by`` if it completes a stop string.

        With ``may_stop`` False, stop strings are ignored.
        """
        if self._detokenizer is None:
            return ""
        return self._release(self._detokenizer.push(token), may_stop)

    def finish(self) -> str:
        """Return the text that was held back, at the end of the sequence; empty if a stop string ended it."""
        if self._detokenizer is None or self.stopped_by is not None:
            return ""
        text = self._release(self._detokenizer.flush(), True)
        text, self._held = text + self._held, ""
        return text

    def _release(self, new: str, may_stop: bool) -> str:
        text = self._held + new
        if not self._stop or not may_stop:
            self._held = ""
            return text
        found = min(((text.find(stop), stop) for stop in self._stop if stop in text), default=None)
        if found is not None:
            start, self.stopped_by = found
            self._held = ""
            return text[: start + len(self.stopped_by)] if self._include_stop else text[:start]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` with which ``stop`` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
