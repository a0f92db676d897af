"""The log-probabilities of a prompt's tokens, gathered while the prompt is computed chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..base import PromptLogprobs
from .token_texts import BEFORE_TOKENS
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from array import array


class PromptScores:
    """The scores of a prompt's tokens, from the second one on, each with ``count`` most likely tokens."""

    def __init__(self, count: int) -> None:
        from array import array  # no start waits for it

        self.count = count
        self._taken = 0
        self._token_ids = array("i")
        self._logprobs = array("f")
        self._ranks = array("i")

    @property
    def scored(self) -> int:
        """The number of tokens that have a score. A prompt that is computed again is not scored again."""
        return self._taken + len(self._ranks)

    def add(self, token_ids: array[int], logprobs: array[float], ranks: array[int]) -> None:
        """Add the next tokens' scores, in the form of ``PromptLogprobs``."""
        self._token_ids.extend(token_ids)
        self._logprobs.extend(logprobs)
        self._ranks.extend(ranks)

    def take(self) -> tuple[array[int], array[float], array[int]]:
        """Return the scores that were added, and forget them, but not how many there were. A worker sends them on."""
        self._taken = self.scored
        found = self._token_ids[:], self._logprobs[:], self._ranks[:]
        for values in (self._token_ids, self._logprobs, self._ranks):
            del values[:]
        return found

    def logprobs(self, prompt: Sequence[int], tokenizer: Tokenizer) -> PromptLogprobs:
        """Return the scores of a whole prompt, with the texts of their tokens."""
        texts: dict[int, str] = {}
        texts_here: dict[int, str] = {}
        if tokenizer.present:
            texts = tokenizer.texts.of([*self._token_ids, *prompt])
            texts_here = self._texts_inside_characters(prompt, texts, tokenizer)
        first = prompt[0], texts.get(prompt[0], "")
        return PromptLogprobs(first, self.count + 1, self._token_ids, self._logprobs, self._ranks, texts, texts_here)

    def _texts_inside_characters(
        self, prompt: Sequence[int], texts: dict[int, str], tokenizer: Tokenizer
    ) -> dict[int, str]:
        """Return the texts of tokens that may complete a character which the tokens before have begun, by place."""
        width = self.count + 1
        found: dict[int, str] = {}
        for position in range(1, len(prompt)):
            if texts[prompt[position - 1]]:
                continue
            before = prompt[max(position - BEFORE_TOKENS, 0) : position]
            for place in range((position - 1) * width, position * width):
                token = self._token_ids[place]
                if not texts[token]:
                    found[place] = tokenizer.texts.after(before, token)
        return found
