"""The text of single tokens, beside their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

_REPLACEMENT = "\ufffd"  # decoders write it for bytes that are not a whole character
_SPACE = "\u2581"  # how SentencePiece writes a space; decoders drop it at the beginning of a text
Pair = tuple[tuple[int, ...], int]  # the tokens before a token, and the token
BEFORE_TOKENS = 4  # how many tokens before another one its text may depend on: a character has four bytes


class TokenTexts:
    """The texts of a tokenizer's tokens, as vLLM gives them.

    A token that ends inside a character has no text. The token that completes the character has all of it. ``pieces``
    and ``decode_each`` are the tokenizer's methods.
    """

    def __init__(
        self,
        pieces: Callable[[list[int]], list[str | None]],
        decode_each: Callable[[list[list[int]]], list[str]],
    ) -> None:
        self._pieces, self._decode_each = pieces, decode_each
        self._found: dict[int, str] = {}

    def of(self, token_ids: Iterable[int]) -> dict[int, str]:
        """Return the text of each token, whatever is before it."""
        wanted = set(token_ids)
        missing = sorted(token for token in wanted if token not in self._found)
        if missing:
            pieces = self._pieces(missing)
            texts = self._decode_each([[token] for token in missing])
            self._found.update(zip(missing, map(_whole, pieces, texts), strict=True))
        return {token: self._found[token] for token in wanted}

    def after(self, before: Sequence[int], tokens: Iterable[int]) -> dict[int, str]:
        """Return the texts of tokens, each of which comes after ``before``, whose last ``BEFORE_TOKENS`` count."""
        texts = self.of(tokens)
        if before and not self._text(before[-1]):
            context = tuple(before[-BEFORE_TOKENS:])
            found = self.inside_characters((context, token) for token, text in texts.items() if not text)
            texts |= {token: text for (_, token), text in found.items()}
        return texts

    def inside_characters(self, pairs: Iterable[Pair]) -> dict[Pair, str]:
        """Return the texts of tokens that have none alone, each after tokens of which the last one has none either."""
        left = list(pairs)
        found = dict.fromkeys(left, "")
        complete: list[tuple[Pair, int, str]] = []  # with the count of tokens before, and the text with theirs
        for count in range(1, BEFORE_TOKENS + 1):
            left = [pair for pair in left if len(pair[0]) >= count]
            wholes = self._decode_each([[*before[-count:], token] for before, token in left])
            inside = []
            for pair, whole in zip(left, wholes, strict=True):
                if whole.endswith(_REPLACEMENT):
                    inside.append(pair)
                else:
                    complete.append((pair, count, whole))
            left = inside
        starts = self._decode_each([self._without_textless(pair[0][-count:]) for pair, count, _ in complete])
        for (pair, _, whole), start in zip(complete, starts, strict=True):
            found[pair] = whole[_common_length(start, whole) :]
        return found

    def _without_textless(self, context: tuple[int, ...]) -> list[int]:
        """Return tokens without the last ones that have no text."""
        stop = len(context)
        while stop and not self._text(context[stop - 1]):
            stop -= 1
        return list(context[:stop])

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
