"""Prefix caching: a prompt that begins like an earlier one uses its keys and values (RadixAttention, SGLang; vLLM).

A block is found by its 16 tokens and by the content of the block before. Tokens are compared, not only hashes of them,
so nobody can make a prompt that finds the blocks of another one.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import TYPE_CHECKING, NamedTuple

from ..serving.sequence import Sequence
from .block_pool import BlockPool
from .kv_cache import BLOCK_TOKENS, KvCache

if TYPE_CHECKING:
    from .recorded_blocks import RecordedBlocks

_RECORDED = "recorded"  # the first part of keys of recorded blocks; those of others begin with a tuple or a number
_KEPT_MB = 1024  # in the host's memory, which others need, too; a GPU's is reserved for the KV cache anyway


class _Place(NamedTuple):
    """The place of a sequence's next block: behind what ``last`` stands for.

    ``recorded`` is the number of the recorded block before it; None if it can be behind none.
    """

    last: Hashable
    recorded: int | None = None


class _Named(NamedTuple):
    """The first ``blocks`` blocks of a sequence have been named, and ``place`` is that of the next one."""

    blocks: int
    place: _Place


class _Part(NamedTuple):
    """A block of keys and values: ``block`` of the pool or, if that is None, the recorded one numbered ``recorded``."""

    key: Hashable
    block: int | None
    recorded: int | None


class Found(NamedTuple):
    """The parts that hold a sequence's first tokens. ``awaited`` says that the next one is recorded and may arrive."""

    parts: list[_Part]
    awaited: bool = False


class PrefixCache:
    """Knows which blocks of a pool hold which tokens. Belongs to the engine's thread.

    Sequences share blocks if they use the same adapter and have the same ``cache_salt``. All that use no adapter share
    the ``recorded`` prompts of a state bundle.
    """

    def __init__(self, pool: BlockPool, recorded: RecordedBlocks | None = None) -> None:
        self._pool = pool
        self._recorded = recorded
        self._named: dict[Sequence, _Named] = {}

    def find(self, sequence: Sequence) -> Found:
        """Return what holds a sequence's first tokens, but never its last one, which has to be computed.

        A prompt whose tokens are scored has to be computed whole.
        """
        parts: list[_Part] = []
        if sequence.prompt_scores is not None:
            return Found(parts)
        place = self._beginning(sequence)
        while (len(parts) + 1) * BLOCK_TOKENS < len(sequence.tokens):
            key, recorded = self._key(sequence, len(parts), place)
            content = self._pool.find(key)
            if content is None and (recorded is None or self._recorded is None or not self._recorded.present):
                return Found(parts, self._is_awaited(sequence, len(parts), recorded))
            parts.append(_Part(key, None if content is None else content.block, recorded))
            place = self._behind(sequence, recorded, 0 if content is None else content.number)
        return Found(parts)

    def take(self, found: Found) -> list[int]:
        """Return the blocks of what was found, of which the caller is now a user.

        Recorded ones are copied into free blocks. If there are too few, the caller gets those before them.
        """
        parts, absent = found.parts, [part for part in found.parts if part.block is None]
        self._pool.share(part.block for part in parts if part.block is not None)
        fresh = self._pool.allocate(len(absent))
        if fresh is None:
            first = parts.index(absent[0])
            self._pool.release([part.block for part in parts[first:] if part.block is not None])
            return [part.block for part in parts[:first] if part.block is not None]
        if self._recorded is not None and fresh:
            self._recorded.copy([part.recorded for part in absent if part.recorded is not None], fresh)
        for part, block in zip(absent, fresh, strict=True):
            self._pool.name(block, part.key)
        copies = iter(fresh)
        return [next(copies) if part.block is None else part.block for part in parts]

    def note(self, sequence: Sequence) -> None:
        """Note what a sequence has computed."""
        full = sequence.computed // BLOCK_TOKENS
        blocks, place = self._named.get(sequence) or _Named(0, self._beginning(sequence))
        if full > blocks:
            for number in range(blocks, full):
                key, recorded = self._key(sequence, number, place)
                place = self._behind(sequence, recorded, self._pool.name(sequence.blocks[number], key).number)
            self._named[sequence] = _Named(full, place)

    def leave(self, sequence: Sequence) -> None:
        """Note that a sequence is about to release its blocks."""
        self.note(sequence)
        self._named.pop(sequence, None)

    def forget(self) -> None:
        """Forget everything, because what blocks held is lost."""
        self._named.clear()
        self._pool.forget()

    def _is_awaited(self, sequence: Sequence, number: int, recorded: int | None) -> bool:
        """Return whether to wait for the blocks that are recorded for a sequence, from its block ``number`` on."""
        if recorded is None or self._recorded is None or not self._recorded.pending:
            return False
        first = number
        while recorded is not None and (number + 1) * BLOCK_TOKENS < len(sequence.tokens):
            number += 1
            _, recorded = self._key(sequence, number, _Place(None, recorded))
        return self._recorded.is_worth_waiting(number - first)

    def _beginning(self, sequence: Sequence) -> _Place:
        beginning = None if self._recorded is None or sequence.adapter is not None else self._recorded.beginning
        return _Place(_root(sequence), beginning)

    def _key(self, sequence: Sequence, number: int, place: _Place) -> tuple[Hashable, int | None]:
        """Return the key of what the sequence's block of this number holds, and the number of such a recorded block."""
        tokens = array("i", sequence.tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]).tobytes()
        if self._recorded is not None and place.recorded is not None:
            recorded = self._recorded.child(place.recorded, tokens)
            if recorded is not None:
                return (_RECORDED, recorded), recorded
        return (place.last, tokens), None

    def _behind(self, sequence: Sequence, recorded: int | None, content: int) -> _Place:
        """Return the place behind a recorded block, or else behind a content of this number.

        What comes behind recorded blocks is shared with none but those that share all with this sequence.
        """
        return _Place(content) if recorded is None else _Place((_root(sequence), recorded), recorded)


def prefix_cache(cache: KvCache, kept_mb: int | None, recorded: RecordedBlocks | None = None) -> PrefixCache | None:
    """Return a KV cache's prefix cache, for which up to ``kept_mb`` MiB are kept of what nobody uses; None for 0.

    By default that is a GiB, or all of a GPU's KV cache. ``recorded`` are the prompts of the state bundle.
    """
    if kept_mb == 0:
        return None
    if kept_mb is None:
        kept_mb = _KEPT_MB if cache.pool.device.type == "cpu" else cache.blocks.blocks * cache.shape.block_bytes >> 20
    cache.blocks.most_kept = (kept_mb << 20) // cache.shape.block_bytes
    return PrefixCache(cache.blocks, recorded)


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
