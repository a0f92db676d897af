"""The text of a sequence as the caller gets it: up to a stop string, and never a part of one."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter

from .detokenizer import Detokenizer
from .stop_string import StopString


class Transcript:
    """Turns tokens into text that can be sent, and holds back text that may be the beginning of a stop string.

    Without a detokenizer the text is always empty. ``stopped_by`` is the stop string that was reached.
    """

    def __init__(self, detokenizer: Detokenizer | None, stop: Iterable[str], *, include_stop: bool) -> None:
        self._detokenizer = detokenizer
        self._stops = tuple(map(StopString, stop))
        self._include_stop = include_stop
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token: int, *, may_stop: bool = True) -> str:
        """Add a token, and return the text that can be sent now. Sets ``stopped_by`` if it completes a stop string.

        With ``may_stop`` False, a stop string may begin with this token but not end with it, as in vLLM.
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
        if not self._stops:
            return text
        ends = [(stop.read(new, may_stop=may_stop), stop.text) for stop in self._stops]
        found = [(len(self._held) + end, stop) for end, stop in ends if end is not None]
        if found:
            end, self.stopped_by = min(found, key=itemgetter(0))  # the one that is complete first
            self._held = ""
            return text[: end if self._include_stop else end - len(self.stopped_by)]
        keep = max(stop.matched for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
