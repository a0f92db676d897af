"""The log-probabilities of a prompt's tokens, gathered while the prompt is computed chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..base import PromptLogprobs
from .token_texts import BEFORE_TOKENS, Pair
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from array import array


_MOST_PAIRS = 1 << 12  # decoded in one call, which keeps Python's lock for some milliseconds


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

    def logprobs(self, prompt: Sequence[int]) -> PromptLogprobs:
        """Return the scores of a whole prompt, without texts."""
        return PromptLogprobs((prompt[0], ""), self.count + 1, self._token_ids, self._logprobs, self._ranks, {}, {})


def with_texts(found: PromptLogprobs, tokenizer: Tokenizer) -> PromptLogprobs:
    """Return a prompt's log-probabilities with the texts of their tokens.

    For a long prompt it takes seconds, so it belongs into a thread for which no other request waits.
    """
    if not tokenizer.present:
        return found
    prompt = [found.first[0], *found.token_ids[:: found.width]]
    texts = tokenizer.texts.of([prompt[0], *found.token_ids])
    texts_here: dict[int, str] = {}
    places: dict[Pair, list[int]] = {}
    for position in range(1, len(prompt)):
        if texts[prompt[position - 1]]:
            continue
        before = tuple(prompt[max(position - BEFORE_TOKENS, 0) : position])
        for place in range((position - 1) * found.width, position * found.width):
            token = found.token_ids[place]
            if not texts[token]:
                places.setdefault((before, token), []).append(place)
        if len(places) >= _MOST_PAIRS:
            texts_here |= _texts_inside_characters(places, tokenizer)
            places = {}
    texts_here |= _texts_inside_characters(places, tokenizer)
    return found._replace(first=(prompt[0], texts[prompt[0]]), texts=texts, texts_here=texts_here)


def _texts_inside_characters(places: dict[Pair, list[int]], tokenizer: Tokenizer) -> dict[int, str]:
    """Return by place the texts of tokens that complete a character which the tokens before have begun."""
    texts = tokenizer.texts.inside_characters(places)
    return {place: text for pair, text in texts.items() if text for place in places[pair]}
