"""Recorded prompts, whose keys and values a state bundle holds, so that no start has to compute them.

Two artifacts are made together. ``prompts`` has the tokens, and is small enough to lie in the manifest. ``prompt-kv``
begins with the SHA-256 of the first one, in hexadecimal digits, and holds the keys and values of one block of tokens
after the other. It is fetched beside the weights.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass

from ..errors import StateError
from .packed import PACKING_ERRORS, array_of, array_text, packed, unpacked

DIGEST_BYTES = 64  # at the beginning of the keys and values
BEGINNING = -1  # the parent of a prompt's first block
_FORMAT = 1
_MOST_BYTES = 8 << 20  # of the JSON
_MOST = 1 << 40
_LENGTH = 64
_ARRAYS = ("parents", "tokens")


@dataclass(frozen=True, slots=True)
class RecordedPrompts:
    """The blocks of recorded prompts, which form a tree: prompts that begin alike have their first blocks in common.

    Block ``n`` holds ``block_tokens`` of ``tokens`` and stands behind the block ``parents[n]``, a smaller number.

    weights: the fingerprint of the weights that have computed the keys and values.
    dtype: theirs, such as "bfloat16".
    block_shape: theirs for one block: (layers, 2, block_tokens, kv_heads, head_dim), keys first.
    max_model_len: the length that was set, on which the scaling of positions may depend.
    block_s: how long it took to compute a block, in seconds, so that no start waits longer for one than it is worth.
    """

    weights: str
    dtype: str
    block_shape: tuple[int, int, int, int, int]
    max_model_len: int
    block_s: float
    parents: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def block_tokens(self) -> int:
        return self.block_shape[2]

    def block(self, number: int) -> tuple[int, ...]:
        """Return the tokens of a block."""
        return self.tokens[number * self.block_tokens : (number + 1) * self.block_tokens]

    def to_bytes(self) -> bytes:
        arrays = {name: array_text("i", getattr(self, name)) for name in _ARRAYS}
        return packed({**asdict(self), **arrays, "format": _FORMAT})

    @classmethod
    def from_bytes(cls, data: bytes) -> RecordedPrompts:
        """Parse recorded prompts. Raises StateError for anything else."""
        try:
            document = unpacked(data, _MOST_BYTES)
            found = document.pop("format")
            arrays = {name: tuple(array_of("i", document[name])) for name in _ARRAYS}
            prompts = cls(**{**document, **arrays, "block_shape": tuple(document["block_shape"])})
            prompts._check()
        except PACKING_ERRORS as error:
            raise StateError(f"expected recorded prompts, found something else ({error}); materialize again") from None
        if found != _FORMAT:
            raise StateError(f"expected recorded prompts of format {_FORMAT}, found another; materialize again")
        return prompts

    def _check(self) -> None:
        """Raise ValueError for values that cannot be."""
        lengths = (*self.block_shape, self.max_model_len)
        if len(self.block_shape) != 5 or not all(type(length) is int and 0 < length < _MOST for length in lengths):
            raise ValueError(f"expected sizes above 0, found {str(lengths)[:_LENGTH]}")
        if type(self.weights) is not str or type(self.dtype) is not str:
            raise TypeError("expected texts for weights and dtype")
        if type(self.block_s) not in (int, float) or not 0 <= self.block_s < _MOST:
            raise ValueError("expected the seconds that a block took")
        if len(self.tokens) != len(self.parents) * self.block_tokens or not self.parents:
            raise ValueError(f"expected {len(self.parents)} blocks of tokens, found {len(self.tokens)} tokens")
        if not all(BEGINNING <= parent < number for number, parent in enumerate(self.parents)):
            raise ValueError("expected each block behind an earlier one")


def digest(prompts: bytes) -> bytes:
    """Return what the keys and values of these prompts, the bytes of the artifact, begin with."""
    return hashlib.sha256(prompts).hexdigest().encode()


__all__ = ["BEGINNING", "DIGEST_BYTES", "RecordedPrompts", "digest"]
