"""Looks for one stop string in text that comes piece by piece, in time linear in the text.

It is the algorithm of Knuth, Morris and Pratt (SIAM J. Comput. 6, 1977). Comparing the string with the text again for
every token takes quadratic time: a caller whose long stop strings are nearly reached would hold up all others.
"""

from __future__ import annotations


class StopString:
    """The search for ``text``. ``matched`` is the number of its characters with which the text read so far ends."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        # For each number of matched characters, how many still match if the next one does not. Made as far as needed,
        # because a stop string may be longer than any answer.
        self._shorter = [0, 0]

    def read(self, piece: str, *, may_stop: bool = True) -> int | None:
        """Read the next piece of the text. Return how much of it completes the stop string, or None if it does not.

        With ``may_stop`` False, the stop string may begin in this piece but not end in it.
        """
        stop, matched, at = self.text, self.matched, 0
        while at < len(piece):
            if not matched:
                at = piece.find(stop[0], at)
                if at < 0:
                    break
            while matched and stop[matched] != piece[at]:
                matched = self._shorter[matched]
            matched += stop[matched] == piece[at]
            at += 1
            if matched == len(stop) and may_stop:
                self.matched = 0
                return at
            if matched == len(self._shorter):
                self._extend()
            if matched == len(stop):
                matched = self._shorter[matched]
        self.matched = matched
        return None

    def _extend(self) -> None:
        stop, last = self.text, len(self._shorter) - 1
        shorter = self._shorter[last]
        while shorter and stop[shorter] != stop[last]:
            shorter = self._shorter[shorter]
        self._shorter.append(shorter + (stop[shorter] == stop[last]))


__all__ = ["StopString"]
