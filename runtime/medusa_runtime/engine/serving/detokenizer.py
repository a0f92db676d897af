"""Streaming detokenisation: text as tokens come, never half a character."""

from __future__ import annotations

from collections.abc import Callable, Iterable

_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet
_CONTEXT_TOKENS = 6
_LONGEST_PART = 3  # tokens of a character that is not complete: a byte each
_LONGEST_HOLD = 16  # a character has at most 4 bytes, so that many tokens without one will not become one
_LONGEST_WINDOW = 48
_TAIL_TOKENS = 8

Decode = Callable[[list[int]], str]


class Detokenizer:
    """Decodes a short window of tokens and gives out what is new in it (the prefix-offset algorithm of TGI and vLLM).

    The window starts some tokens back, because decoders treat the beginning of a text differently (SentencePiece drops
    the first space). Text that ends in a replacement character waits: the rest of its bytes may be in the next tokens.
    """

    def __init__(self, decode: Decode, prompt: Iterable[int]) -> None:
        self._decode = decode
        self._window, self._beginnings = self._context(list(prompt))  # one beginning, once it is certain
        self._read = len(self._window)  # tokens of the window that are given out in full
        self._sent = len(self._beginnings[0])  # characters of the window that are given out

    def _context(self, prompt: list[int]) -> tuple[list[int], list[str]]:
        """The prompt's last tokens, and the texts that may turn out to be the prompt's part of what follows.

        There are several when the prompt may end inside a character: only the next tokens say whether its last bytes
        are the beginning of one. Decoders with byte fallback write U+FFFD for all bytes of a run that is no text, so
        the window must not begin inside a character either.
        """
        window = prompt[-_CONTEXT_TOKENS:]
        whole = self._decode(window) if window else ""
        if not whole.endswith(_REPLACEMENT):
            return window, [whole]
        found: list[str] = []
        for size in range(len(window), min(_CONTEXT_TOKENS + _LONGEST_PART, len(prompt)) + 1):
            longer = prompt[-size:]
            texts = [self._decode(longer[: max(size - cut, 0)]) for cut in range(_LONGEST_PART + 1)]
            if not all(text.endswith(_REPLACEMENT) for text in texts):
                return longer, texts
            found = found or texts
        return window, found

    def push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        if len(self._beginnings) > 1:
            self._sent = next((len(each) for each in self._beginnings if text.startswith(each)), 0)
        held = len(self._window) - self._read
        if not text.endswith(_REPLACEMENT):
            new = text[self._sent :]
            if new or held > _LONGEST_HOLD:
                self._advance()
            return new
        if held <= _LONGEST_HOLD:
            return ""
        self._beginnings = [""]
        new = text[self._sent : -1]
        self._sent = max(self._sent, len(text) - 1)
        if len(self._window) > _LONGEST_WINDOW:
            self._shorten(text)
        return new

    def flush(self) -> str:
        """Return what is left at the end, an incomplete character as U+FFFD."""
        new = self._decode(self._window)[self._sent :]
        self._advance()
        return new

    def _advance(self) -> None:
        self._beginnings = [""]
        start = min(self._read, len(self._window) - 1) if len(self._window) > _CONTEXT_TOKENS else 0
        self._window = self._window[start:]
        self._read = len(self._window)
        self._sent = len(self._decode(self._window)) if self._window else 0

    def _shorten(self, text: str) -> None:
        """Cut a window of bytes that are no text, where that does not change how the rest is read."""
        for cut in range(len(self._window) - _TAIL_TOKENS, 0, -1):
            left, right = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if left + right == text and len(left) <= self._sent:
                self._window, self._sent, self._read = self._window[cut:], self._sent - len(left), 0
                return
