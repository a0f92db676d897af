"""Consolidation, from many workers to one: the leader gathers the keys and values of all sequences (ParaServe §6).

Full blocks are gathered in rounds while steps go on. When little is left for the next round, no more steps begin. Once
the steps under way have ended, a last round gathers the blocks that were still written to. Then the leader goes on
alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from medusa_runtime.engine.serving.sequence import Sequence
from medusa_runtime.engine.torch.kv_cache import BLOCK_TOKENS, blocks_for

from .gathering import Gathering

_MOST_ROUNDS = 8


class _Gathered(NamedTuple):
    """The first ``length`` blocks of a table have been gathered. A sequence that lost its blocks has another table."""

    table: list[int]
    length: int


class Consolidation:
    """One consolidation, after which the first ``keep`` workers are instances."""

    def __init__(self, gathering: Gathering, keep: int) -> None:
        self.keep = keep
        self.began_ns = time.monotonic_ns()
        self.draining = False
        self._drained_ns = self._early_bytes = 0
        self._gathering = gathering
        self._gathered: dict[Sequence, _Gathered] = {}
        self._round: dict[Sequence, _Gathered] = {}
        self._rounds = 0
        self._last = False

    def begin(self, running: Iterable[Sequence], computed_by_all: Callable[[Sequence], int]) -> None:
        """Begin the first round, with the blocks that are full.

        ``computed_by_all`` returns how many tokens of a sequence every worker has computed.
        """
        self._fetch({one: computed_by_all(one) // BLOCK_TOKENS for one in running})

    def ended(self, running: Iterable[Sequence], computed_by_all: Callable[[Sequence], int]) -> bool:
        """Note that a round has ended, and begin the next one unless it is the last. Return whether it was the last."""
        for sequence, gathered in self._round.items():
            if sequence.blocks is gathered.table:
                self._gathered[sequence] = gathered
        self._round = {}
        if self._last:
            return True
        counts = {one: computed_by_all(one) // BLOCK_TOKENS for one in running}
        new = sum(count - self._count(one) for one, count in counts.items())
        if new <= len(counts) or self._rounds >= _MOST_ROUNDS:
            self.draining = True
            self._early_bytes = self._gathering.bytes
            self._drained_ns = time.monotonic_ns()
        else:
            self._fetch(counts)
        return False

    def gather_last(self, running: Iterable[Sequence]) -> None:
        """Begin the last round, with everything that is missing. No step may be under way."""
        if not self._last and not self._round:
            self._last = True
            self._fetch({one: blocks_for(one.computed) for one in running})

    def gathered_tokens(self, sequence: Sequence) -> int:
        """Return how many of a sequence's tokens have all their keys and values in the leader."""
        return self._count(sequence) * BLOCK_TOKENS

    def detail(self) -> dict[str, Any]:
        """Return bytes, rounds and the pause, for the timeline."""
        pause_s = (time.monotonic_ns() - self._drained_ns) / 1e9
        last = self._gathering.bytes - self._early_bytes
        return {
            "bytes": self._gathering.bytes,
            "last_bytes": last,
            "rounds": self._rounds,
            "pause_s": round(pause_s, 6),
        }

    def close(self) -> None:
        self._gathering.close()

    def _count(self, sequence: Sequence) -> int:
        gathered = self._gathered.get(sequence)
        return gathered.length if gathered is not None and gathered.table is sequence.blocks else 0

    def _fetch(self, counts: dict[Sequence, int]) -> None:
        self._rounds += 1
        blocks: list[int] = []
        for sequence, count in counts.items():
            have = self._count(sequence)
            if count > have:
                blocks += sequence.blocks[have:count]
                self._round[sequence] = _Gathered(sequence.blocks, count)
        self._gathering.fetch(blocks)


__all__ = ["Consolidation"]
