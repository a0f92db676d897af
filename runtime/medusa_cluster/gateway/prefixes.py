"""Which instances have computed the beginning of a prompt (as in SGLang's router and NVIDIA Dynamo's).

A prompt's first 32 KiB are cut into pieces of 1 KiB. A piece is known by a digest of it and of all before it. An
instance that got a prompt has its pieces in its prefix cache, unless it has needed the room since.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

PIECE_BYTES = 1024
_MOST_PIECES = 32
_MOST_BYTES = _MOST_PIECES * PIECE_BYTES
_MOST_HOLDERS = 4  # of a piece, such as one of a prompt that all clients begin with
# In the order in which chat templates use them. What is alike has to come first.
_FIELDS = ("cache_salt", "tools", "system", "instructions", "prompt", "messages", "input")


def prompt_prefix(model: str, request: Mapping[str, Any]) -> tuple[bytes, ...]:
    """Return the digests of a prompt's pieces, from the first one on. A last piece that is not whole has none."""
    text = bytearray()
    for part in _texts([request.get(name) for name in _FIELDS]):
        text += part
        if len(text) >= _MOST_BYTES:
            break
    digest, found = blake2b(model.encode("utf-8", "surrogatepass"), digest_size=16), []
    for end in range(PIECE_BYTES, min(len(text), _MOST_BYTES) + 1, PIECE_BYTES):
        digest.update(text[end - PIECE_BYTES : end])
        found.append(digest.digest())
    return tuple(found)


def _texts(value: Any) -> Iterator[bytes]:
    """Yield the parts of a value in order. What is added to a list adds parts behind all others."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, str):
            yield part[:_MOST_BYTES].encode("utf-8", "surrogatepass") + b"\0"
        elif isinstance(part, list):
            left += reversed(part[:_MOST_BYTES])
            yield b"["
        elif isinstance(part, dict):
            left += [each for item in reversed(part.items()) for each in reversed(item)]
            yield b"{"
        else:
            yield b"%a," % part


class Prefixes:
    """The instances that got a piece last, for the pieces that came last. Use it in one event loop only."""

    def __init__(self, most: int = 1 << 16) -> None:
        self._most = most
        self._holders: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()

    def note(self, prefix: tuple[bytes, ...], instance_id: str) -> None:
        """Note that an instance gets a prompt with this prefix."""
        for piece in reversed(prefix):  # so that the beginning is forgotten last
            others = [one for one in self._holders.pop(piece, ()) if one != instance_id]
            self._holders[piece] = (instance_id, *others[: _MOST_HOLDERS - 1])
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def pieces(self, prefix: tuple[bytes, ...]) -> dict[str, int]:
        """Return how many of the first pieces each instance has, by the instance's id."""
        found: dict[str, int] = {}
        for number, piece in enumerate(prefix):
            having = [one for one in self._holders.get(piece, ()) if found.get(one, 0) == number]
            if not having:
                break
            found.update(dict.fromkeys(having, number + 1))
        return found
