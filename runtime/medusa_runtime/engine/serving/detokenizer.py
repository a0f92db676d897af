"""Streaming detokenization: turns tokens into text as they come, and never sends half a character."""

from __future__ import annotations

from collections.abc import Callable, Iterable

_REPLACEMENT = "\ufffd"  # decoders write it for bytes that are not a character, or not a complete one yet
_CONTEXT_TOKENS = 6
_LONGEST_PART = 3  # most tokens of an incomplete character, if each is a byte
_LONGEST_HOLD = 16  # a character has at most 4 bytes, so after this many tokens the bytes are not going to be one
_LONGEST_WINDOW = 48
_TAIL_TOKENS = 8

Decode = Callable[[list[int]], str]


class Detokenizer:
    """Decodes a short window of tokens and returns what is new in it (the prefix-offset algorithm of TGI and vLLM).

    The window starts some tokens back, because decoders treat the beginning of a text differently (SentencePiece drops
    the first space). Text that ends in a replacement character is held back, because its missing bytes may be in the
    next tokens.
    """

    def __init__(self, decode: Decode, prompt: Iterable[int]) -> None:
        self._decode = decode
        self._window, self._beginnings = self._context(list(prompt))  # a single beginning once it is certain
        self._read = len(self._window)  # how many tokens of the window have been returned in full
        self._sent = len(self._beginnings[0])  # how many characters of the window's text have been returned

    def _context(self, prompt: list[int]) -> tuple[list[int], list[str]]:
        """Return the prompt's last tokens as the first window, and the possible texts of the prompt's part of it.

        There are several possible texts if the prompt may end inside a character: only the next tokens show whether its
        last bytes begin one. The window must not begin inside a character either, because decoders with byte fallback
        write U+FFFD for all bytes of a run that is not text.
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
        """Return the text that is left at the end, with an incomplete character as U+FFFD."""
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
        """Shorten a window of bytes that are not text, at a place where the rest decodes to the same text."""
        for cut in range(len(self._window) - _TAIL_TOKENS, 0, -1):
            left, right = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            if left + right == text and len(left) <= self._sent:
                self._window, self._sent, self._read = self._window[cut:], self._sent - len(left), 0
                return
