"""Prefix caching: a prompt that begins like an earlier one uses its keys and values (RadixAttention, SGLang; vLLM).

A block is found by its 16 tokens and by the content of the block before. Tokens are compared, not only hashes of them,
so nobody can make a prompt that finds the blocks of another one.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import NamedTuple

from ..serving.sequence import Sequence
from .block_pool import BlockPool
from .kv_cache import BLOCK_TOKENS, KvCache

_KEPT_MB = 1024  # in the host's memory, which others need, too; a GPU's is reserved for the KV cache anyway


class _Named(NamedTuple):
    """The first ``blocks`` blocks of a sequence have been named. ``last`` stands for what they hold."""

    blocks: int
    last: Hashable


class PrefixCache:
    """Knows which blocks of a pool hold which tokens. Belongs to the engine's thread.

    Sequences share blocks if they use the same adapter and have the same ``cache_salt``.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._named: dict[Sequence, _Named] = {}

    def find(self, sequence: Sequence) -> list[int]:
        """Return the blocks that hold a sequence's first tokens, but never its last one, which has to be computed.

        A prompt whose tokens are scored has to be computed whole.
        """
        if sequence.prompt_scores is not None:
            return []
        found: list[int] = []
        last = _root(sequence)
        while (len(found) + 1) * BLOCK_TOKENS < len(sequence.tokens):
            content = self._pool.find(_key(sequence, len(found), last))
            if content is None:
                break
            found.append(content.block)
            last = content.number
        return found

    def note(self, sequence: Sequence) -> None:
        """Note what a sequence has computed."""
        full = sequence.computed // BLOCK_TOKENS
        blocks, last = self._named.get(sequence) or _Named(0, _root(sequence))
        if full > blocks:
            for number in range(blocks, full):
                last = self._pool.name(sequence.blocks[number], _key(sequence, number, last)).number
            self._named[sequence] = _Named(full, last)

    def leave(self, sequence: Sequence) -> None:
        """Note that a sequence is about to release its blocks."""
        self.note(sequence)
        self._named.pop(sequence, None)

    def forget(self) -> None:
        """Forget everything, because what blocks held is lost."""
        self._named.clear()
        self._pool.forget()


def prefix_cache(cache: KvCache, kept_mb: int | None) -> PrefixCache | None:
    """Return a KV cache's prefix cache, for which up to ``kept_mb`` MiB are kept of what nobody uses; None for 0.

    By default that is a GiB, or all of a GPU's KV cache.
    """
    if kept_mb == 0:
        return None
    if kept_mb is None:
        kept_mb = _KEPT_MB if cache.pool.device.type == "cpu" else cache.blocks.blocks * cache.shape.block_bytes >> 20
    cache.blocks.most_kept = (kept_mb << 20) // cache.shape.block_bytes
    return PrefixCache(cache.blocks)


def shared_tokens(one: Sequence, other: Sequence) -> int:
    """Return how many tokens two sequences could share: whole blocks, and not the last token of the second."""
    if _root(one) != _root(other):
        return 0
    low, high = 0, min(len(one.tokens), len(other.tokens) - 1) // BLOCK_TOKENS
    while low < high:  # sequences that share so many blocks share all before, too
        middle = (low + high + 1) // 2
        part = slice(low * BLOCK_TOKENS, middle * BLOCK_TOKENS)
        if one.tokens[part] == other.tokens[part]:
            low = middle
        else:
            high = middle - 1
    return low * BLOCK_TOKENS


def _root(sequence: Sequence) -> Hashable:
    """Return what stands for the beginning of a sequence. It is no number of a content."""
    adapter = sequence.adapter
    return (0 if adapter is None else adapter.number, sequence.request.cache_salt)


def _key(sequence: Sequence, number: int, last: Hashable) -> Hashable:
    """Return the key of what the sequence's block of this number holds, behind what ``last`` stands for."""
    tokens = sequence.tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
    return last, array("i", tokens).tobytes()
