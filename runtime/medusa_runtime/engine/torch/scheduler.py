"""Chooses the tokens of the next step: iteration-level scheduling (Orca, OSDI'22), first come, first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

from ..serving.sequence import Sequence, Span
from .block_pool import BlockPool
from .kv_cache import BLOCK_TOKENS, blocks_for
from .prefix_cache import PrefixCache, shared_tokens

_ALONE = 8  # a prompt that others could compute is computed here if what is left of it is this part of a step


class Scheduler:
    """Mixes decodes with chunks of prefills (Sarathi-Serve, OSDI'24), up to ``max_batched_tokens`` a step.

    When blocks run out, the sequence that came last is preempted: it gives its blocks back and is recomputed later.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_concurrency: int,
        max_batched_tokens: int,
        most_scored_tokens: int | None = None,
        prefixes: PrefixCache | None = None,
        slots: BlockPool | None = None,
    ) -> None:
        """Schedule at most ``most_scored_tokens`` in a step of prompts whose tokens are scored.

        Without ``prefixes``, every sequence computes its whole prompt. Of ``slots``, for models whose layers keep a
        state of each sequence, a sequence has one while it runs; there are ``max_concurrency`` of them.
        """
        self._slots = slots
        self._pool = pool
        self._prefixes = prefixes
        self._max_concurrency = max_concurrency
        # Every running sequence can decode in one step, so that none of them starves.
        self._max_batched_tokens = max(max_batched_tokens, max_concurrency)
        self._most_scored_tokens = most_scored_tokens or self._max_batched_tokens
        self._scored_budget = 0  # what is left of it in the step that is being scheduled
        self._whole = 0  # the length of prompts that are not cut in that step
        self.running: list[Sequence] = []  # by arrival
        self.waiting: deque[Sequence] = deque()
        self.preemptions = 0
        self.cached_tokens = 0  # of prompts, when they were first scheduled

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, finished or not, and free its blocks."""
        self._free(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def schedule(self, busy: Collection[Sequence] = (), most: int | None = None, whole: int = 0) -> list[Span]:
        """Return the spans of the next step, decodes first; empty if there is nothing to do.

        Each span's sequence gets the blocks that it needs. The spans do not count as computed yet. Sequences that are
        ``busy`` in an unfinished step are left alone. At most ``most`` sequences decode in this step. Prompts of up to
        ``whole`` tokens are not cut, and do not count, because others compute them.
        """
        budget = self._max_batched_tokens
        if self._prefixes is not None:
            for sequence in self.running:
                self._prefixes.note(sequence)
        decodes: list[Span] = []
        index = 0
        while index < len(self.running):  # preemption takes sequences off the end of the list
            sequence = self.running[index]
            index += 1
            if sequence in busy or (most is not None and len(decodes) >= most):
                continue
            if len(sequence.tokens) - sequence.computed == 1 and self._make_room(sequence):
                decodes.append(Span(sequence, sequence.computed, sequence.computed + 1))
                budget -= 1
        prefills: list[Span] = []
        self._scored_budget, self._whole = self._most_scored_tokens, whole
        for sequence in self.running:
            if len(sequence.tokens) - sequence.computed > 1 and sequence not in busy:
                budget -= self._prefill(sequence, budget, prefills)
        self._admit(budget, prefills, busy)
        return decodes + prefills

    def rewind(self, sequence: Sequence, computed: int) -> None:
        """Count at most ``computed`` tokens of a running sequence as computed, because the other values are lost.

        It gets blocks up to its last token. If too few are free, it is put back among the waiting sequences.
        """
        sequence.computed = min(computed, sequence.computed)
        taken = self._pool.allocate(max(blocks_for(len(sequence.tokens)) - len(sequence.blocks), 0))
        if taken is not None:
            sequence.blocks += taken
            return
        self.running.remove(sequence)
        self._free(sequence)
        self.waiting.appendleft(sequence)

    def forget_prefixes(self) -> None:
        """Forget what is in the blocks, but for what running sequences have computed."""
        if self._prefixes is not None:
            for sequence in self.waiting:  # one that waits for more blocks may have some that it has found
                self._free(sequence)
            self._prefixes.forget()

    def recompute(self) -> None:
        """Compute all sequences again from their first token on, because what is in the blocks is wrong."""
        while self.running:
            sequence = self.running[-1]
            self._preempt(sequence)
            if not sequence.generated and sequence.cached_tokens is not None:
                self.cached_tokens -= sequence.cached_tokens
                sequence.cached_tokens = None
        self.forget_prefixes()

    def _admit(self, budget: int, prefills: list[Span], busy: Collection[Sequence]) -> None:
        while self.waiting and len(self.running) < self._max_concurrency:
            sequence = self.waiting[0]
            if budget <= 0 and not self._is_whole(sequence):
                return
            if sequence in busy:  # it was preempted while an unfinished step uses it
                return
            if self._prefixes is not None and not sequence.blocks and not self._reuse(sequence, self._prefixes):
                return
            missing = blocks_for(len(sequence.tokens)) - len(sequence.blocks)
            taken = self._allocate(missing, keep=sequence)
            if taken is None:
                return
            sequence.blocks += taken
            if sequence.cached_tokens is None:
                sequence.cached_tokens = sequence.computed
                self.cached_tokens += sequence.computed
            if self._slots is not None:
                (sequence.slot,) = self._slots.allocate(1) or (None,)
            self.running.append(self.waiting.popleft())
            budget -= self._prefill(sequence, budget, prefills)

    def _reuse(self, sequence: Sequence, prefixes: PrefixCache) -> bool:
        """Give a sequence the blocks that hold its first tokens. Return False if it should wait for more of them.

        It waits for recorded blocks that may still come, and while a running sequence computes half or more of what it
        lacks.
        """
        found = prefixes.find(sequence)
        if found.awaited:
            return False
        cached = len(found.parts) * BLOCK_TOKENS
        missing = len(sequence.tokens) - cached
        if len(sequence.tokens) <= self._whole:  # others may compute it
            if missing > self._max_batched_tokens // _ALONE:
                return True
        elif sequence.prompt_scores is None:
            for other in self.running:
                if len(other.tokens) - other.computed > 1 and 2 * (shared_tokens(other, sequence) - cached) >= missing:
                    return False
        sequence.blocks += prefixes.take(found)
        sequence.computed = len(sequence.blocks) * BLOCK_TOKENS
        return True

    def _prefill(self, sequence: Sequence, budget: int, prefills: list[Span]) -> int:
        if self._is_whole(sequence):
            prefills.append(Span(sequence, 0, len(sequence.tokens)))
            return 0
        if sequence.prompt_scores is not None:
            budget = min(budget, self._scored_budget)
        stop = min(sequence.computed + budget, len(sequence.tokens))
        if stop > sequence.computed:
            prefills.append(Span(sequence, sequence.computed, stop))
        if sequence.prompt_scores is not None:
            self._scored_budget -= stop - sequence.computed
        return stop - sequence.computed

    def _is_whole(self, sequence: Sequence) -> bool:
        return not sequence.computed and sequence.prompt_scores is None and 1 < len(sequence.tokens) <= self._whole

    def _make_room(self, sequence: Sequence) -> bool:
        """Give a sequence a block for its next token if it needs one, preempting the latest sequences if necessary.

        Returns False if the sequence itself was preempted.
        """
        while blocks_for(len(sequence.tokens)) > len(sequence.blocks):
            taken = self._allocate(1)
            if taken is not None:
                sequence.blocks += taken
                return True
            latest = self.running[-1]
            self._preempt(latest)
            if latest is sequence:
                return False
        return True

    def _allocate(self, count: int, keep: Sequence | None = None) -> list[int] | None:
        """Take blocks from the pool, if necessary from waiting sequences; None if there are too few.

        A waiting sequence has blocks if it has found some, but too few others were free. ``keep`` keeps its own.
        """
        while (taken := self._pool.allocate(count)) is None:
            holders = [sequence for sequence in self.waiting if sequence.blocks and sequence is not keep]
            if not holders:
                return None
            self._free(holders[-1])
        return taken

    def _preempt(self, sequence: Sequence) -> None:
        self.running.pop()
        self._free(sequence)
        self.waiting.appendleft(sequence)
        self.preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        if self._prefixes is not None:
            self._prefixes.leave(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks = []
        if self._slots is not None and sequence.slot is not None:
            self._slots.release([sequence.slot])
            sequence.slot = None
        sequence.computed = 0
