"""Biases and penalties: changes to a sequence's logits before a token is chosen."""

from __future__ import annotations

import torch
from torch import Tensor

from ..serving.sequence import Sequence
from .restrictions import Restrictions


def adjust(logits: Tensor, sequence: Sequence) -> None:
    """Change a sequence's logits (fp32 [vocab]) in place.

    Applied in this order: allowed_token_ids, bad_words, logit_bias, min_tokens, repetition penalty, then frequency and
    presence penalty. The repetition penalty is CTRL's (Keskar et al., 2019, section 4.1), and counts the prompt's
    tokens too. The other two are OpenAI's, and count only those of the completion.
    """
    if sequence.adjustment is None:
        sequence.adjustment = Adjustment(sequence, logits.shape[0])
    sequence.adjustment.apply(logits, sequence)


class Adjustment:
    """The changes to a sequence's logits, as tensors that are kept from token to token.

    To make them takes 30 ms for 150,000 tokens, so the thread that adds a request makes them: no step waits for it.
    """

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        params = sequence.params
        self._shared = Restrictions.of(sequence, vocab_size)
        self._restrictions = self._shared  # on the device of the logits
        ends = sorted(sequence.end_token_ids) if params.min_tokens else []
        self._ends = torch.tensor(ends, dtype=torch.long)
        self._tallies = _Tally(0), _Tally(sequence.prompt_length)  # of all tokens, and of the completion's
        self._device: torch.device | None = None

    def apply(self, logits: Tensor, sequence: Sequence) -> None:
        params = sequence.params
        if self._device != logits.device:
            self._move(logits.device)
        self._restrictions.apply(logits, sequence)
        if sequence.generated < params.min_tokens and len(self._ends):
            logits[self._ends] = float("-inf")
        if params.repetition_penalty != 1:
            seen = self._tallies[0].read(sequence.tokens).token_ids
            found, penalty = logits[seen], float(params.repetition_penalty)  # a whole number may be too large
            logits[seen] = torch.where(found > 0, found / penalty, found * penalty)
        if sequence.generated and (params.frequency_penalty or params.presence_penalty):
            generated = self._tallies[1].read(sequence.tokens)
            logits[generated.token_ids] -= params.frequency_penalty * generated.times + params.presence_penalty

    def _move(self, device: torch.device) -> None:
        """Move the tensors to the device of the logits, which the thread that has made them did not know."""
        self._device = device
        for tally in self._tallies:
            tally.token_ids, tally.times = tally.token_ids.to(device), tally.times.to(device)
        self._ends = self._ends.to(device)
        self._restrictions = self._shared.on(device)


class _Tally:
    """The different tokens of a sequence from the place ``start`` on, and how often each of them occurs."""

    def __init__(self, start: int) -> None:
        self._read = start
        self._places: dict[int, int] = {}
        self.token_ids = torch.empty(0, dtype=torch.long)
        self.times = torch.empty(0)

    def read(self, tokens: list[int]) -> _Tally:
        """Count the tokens that have been added since the last call."""
        added, self._read = tokens[self._read :], len(tokens)
        new = [token for token in dict.fromkeys(added) if token not in self._places]
        for token in new:
            self._places[token] = len(self._places)
        if new:
            self.token_ids = torch.cat((self.token_ids, torch.tensor(new)))
            self.times = torch.cat((self.times, torch.zeros(len(new))))
        if added:
            places = torch.tensor([self._places[token] for token in added])
            self.times.index_add_(0, places, torch.ones(len(added)))
        return self


def stuck_rows(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """Return the rows of ``logits`` [sequences, vocab] in which their requests, or grammars, leave no token."""
    restricted = [
        row
        for row, sequence in enumerate(sequences)
        if sequence.params.allowed_token_ids is not None or sequence.bad_words
    ]
    return [row for row in restricted if float(logits[row].amax()) == float("-inf")]
