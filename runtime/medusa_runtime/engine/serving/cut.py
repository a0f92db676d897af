"""Cuts inputs to a number of tokens, as the tokenizers of transformers do: special tokens stay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Cut(NamedTuple):
    """How many tokens an input keeps: ``most`` with its special tokens, None for all.

    ``most_first`` and ``most_second`` limit the text, or the two texts of a pair, before that. What is cut is the end
    of a text, or its beginning if ``left``.
    """

    most: int | None = None
    most_first: int | None = None
    most_second: int | None = None
    left: bool = False

    def __bool__(self) -> bool:
        return self[:3] != (None, None, None)

    def texts(self, encodings: Sequence[Any], special: int) -> None:
        """Cut the encodings of a text, or of the texts of a pair, which ``special`` tokens will be added to."""
        for encoding, most in zip(encodings, (self.most_first, self.most_second), strict=False):
            if most is not None:
                self._cut(encoding, most)
        if self.most is None:
            return
        lengths = _longest_first([len(encoding.ids) for encoding in encodings], max(0, self.most - special))
        for encoding, length in zip(encodings, lengths, strict=True):
            self._cut(encoding, length)

    def ids(self, token_ids: list[int]) -> list[int]:
        """Return token ids cut to ``most``."""
        if self.most is None or len(token_ids) <= self.most:
            return token_ids
        return token_ids[-self.most :] if self.left else token_ids[: self.most]

    def _cut(self, encoding: Any, length: int) -> None:
        if len(encoding.ids) > length:
            encoding.truncate(length, direction="left" if self.left else "right")


def _longest_first(lengths: Sequence[int], most: int) -> list[int]:
    """Return the lengths that texts keep if the longest one always loses the next token."""
    if len(lengths) == 1:
        return [min(most, lengths[0])]
    shorter, longer = sorted(lengths)
    if shorter + longer > most:
        shorter = min(shorter, most // 2)
        longer = most - shorter
    return [shorter, longer] if lengths[0] <= lengths[1] else [longer, shorter]


__all__ = ["Cut"]
