"""The text of single tokens, beside their log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"  # decoders write it for bytes that are not a whole character
_SPACE = "\u2581"  # how SentencePiece writes a space; decoders drop it at the beginning of a text
BEFORE_TOKENS = 4  # how many tokens before another one its text may depend on: a character has four bytes


class TokenTexts:
    """The texts of a tokenizer's tokens, as vLLM gives them.

    A token that ends inside a character has no text. The token that completes the character has all of it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._found: dict[int, str] = {}

    def of(self, token_ids: Iterable[int]) -> dict[int, str]:
        """Return the text of each token, whatever is before it."""
        wanted = set(token_ids)
        missing = sorted(wanted - self._found.keys())
        if missing:
            pieces = self._tokenizer.pieces(missing)
            texts = self._tokenizer.decode_each(missing)
            self._found.update(zip(missing, map(_whole, pieces, texts), strict=True))
        return {token: self._found[token] for token in wanted}

    def after(self, before: Sequence[int], token: int) -> str:
        """Return the text of a token that comes after others, of which the last ``BEFORE_TOKENS`` count."""
        text = self._text(token)
        if text or not before or self._text(before[-1]):
            return text
        for count in range(1, min(BEFORE_TOKENS, len(before)) + 1):
            context = list(before[-count:])
            whole = self._tokenizer.decode([*context, token])
            if whole.endswith(_REPLACEMENT):
                continue
            while context and not self._text(context[-1]):
                context.pop()
            start = self._tokenizer.decode(context) if context else ""
            return whole[_common_length(start, whole) :]
        return ""

    def _text(self, token: int) -> str:
        text = self._found.get(token)
        return self.of((token,))[token] if text is None else text


def _whole(piece: str | None, text: str) -> str:
    if text.endswith(_REPLACEMENT):
        return ""
    if piece is not None and piece.startswith(_SPACE):
        spaces = len(piece) - len(piece.lstrip(_SPACE))
        return " " * (spaces - (len(text) - len(text.lstrip(" ")))) + text
    return text


def _common_length(first: str, second: str) -> int:
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
