"""Biases and penalties: changes to a sequence's logits before a token is chosen."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from ..serving.sequence import Sequence

_MANY = 8  # more than an eighth of the vocabulary is kept as a whole row, which is faster to use


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
    """What changes a sequence's logits, as tensors, which are kept from token to token.

    To make them takes 30 ms for 150,000 tokens, so the thread that adds a request makes them: no step waits for it.
    """

    def __init__(self, sequence: Sequence, vocab_size: int) -> None:
        params = sequence.params
        allowed = params.allowed_token_ids
        self._allowed: Tensor | None = None  # int64, or the others as a mask
        self._forbidden: Tensor | None = None  # bool [vocab]
        if allowed is not None and len(allowed) * _MANY > vocab_size:
            forbidden = bytearray(b"\x01") * vocab_size
            for token in allowed:
                forbidden[token] = 0
            self._forbidden = torch.frombuffer(forbidden, dtype=torch.bool)
        elif allowed is not None:
            self._allowed = torch.tensor(allowed, dtype=torch.long)
        self._words = _Words(sequence.bad_words)
        bias = params.logit_bias or {}
        self._biased: Tensor | slice = slice(None)
        if len(bias) * _MANY > vocab_size:
            biases = array("f", bytes(4 * vocab_size))
            for token, value in bias.items():
                biases[token] = value
            self._biases = torch.frombuffer(biases, dtype=torch.float32)
        else:
            self._biased, self._biases = torch.tensor(list(bias), dtype=torch.long), torch.tensor(list(bias.values()))
        ends = sorted(sequence.end_token_ids) if params.min_tokens else []
        self._ends = torch.tensor(ends, dtype=torch.long)
        self._tallies = _Tally(0), _Tally(sequence.prompt_length)  # of all tokens, and of the completion's
        self._device: torch.device | None = None

    def apply(self, logits: Tensor, sequence: Sequence) -> None:
        params = sequence.params
        if self._device != logits.device:
            self._move(logits.device)
        if self._allowed is not None:
            kept = logits[self._allowed]
            logits.fill_(float("-inf"))
            logits[self._allowed] = kept
        if self._forbidden is not None:
            logits.masked_fill_(self._forbidden, float("-inf"))
        if sequence.bad_words:
            logits[torch.tensor(self._words.completing(sequence), dtype=torch.long)] = float("-inf")
        if params.logit_bias:
            logits[self._biased] += self._biases
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
        self._biases, self._ends = self._biases.to(device), self._ends.to(device)
        if self._forbidden is not None:
            self._forbidden = self._forbidden.to(device)
        if self._allowed is not None:
            self._allowed = self._allowed.to(device)
        if isinstance(self._biased, Tensor):
            self._biased = self._biased.to(device)


class _Words:
    """Words that must not be generated, by what is before their last token."""

    def __init__(self, words: list[list[int]]) -> None:
        self._single = [word[0] for word in words if len(word) == 1]
        # The last token before the last one → all tokens before it → the tokens that complete a word.
        self._longer: dict[int, dict[tuple[int, ...], list[int]]] = {}
        for word in words:
            if len(word) > 1:
                beginnings = self._longer.setdefault(word[-2], {})
                beginnings.setdefault(tuple(word[:-1]), []).append(word[-1])

    def completing(self, sequence: Sequence) -> list[int]:
        """Return the tokens that would complete a word, of which the completion ends with all tokens but the last."""
        found, tokens = self._single, sequence.tokens
        if sequence.generated:
            for before, last in self._longer.get(tokens[-1], {}).items():
                if sequence.generated >= len(before) and tuple(tokens[-len(before) :]) == before:
                    found = found + last
        return found


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
