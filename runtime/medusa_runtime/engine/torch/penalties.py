"""Biases and penalties: changes to a sequence's logits before a token is chosen."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

from ..serving.sequence import Sequence


def adjust(logits: Tensor, sequence: Sequence) -> None:
    """Change a sequence's logits (fp32 [vocab]) in place.

    Applied in this order: allowed_token_ids, bad_words, logit_bias, min_tokens, repetition penalty, then frequency and
    presence penalty. The repetition penalty is CTRL's (Keskar et al., 2019, section 4.1), and counts the prompt's
    tokens too. The other two are OpenAI's, and count only those of the completion.
    """
    params = sequence.params
    if params.allowed_token_ids is not None:
        if sequence.allowed is None:
            sequence.allowed = torch.tensor(params.allowed_token_ids)
        kept = logits[sequence.allowed]
        logits.fill_(float("-inf"))
        logits[sequence.allowed] = kept
    if sequence.bad_words:
        forbidden = [word[-1] for word in sequence.bad_words if _would_complete(sequence, word)]
        logits[torch.tensor(forbidden, dtype=torch.long)] = float("-inf")
    if params.logit_bias:
        logits[torch.tensor(list(params.logit_bias))] += torch.tensor(list(params.logit_bias.values()))
    if sequence.generated < params.min_tokens and sequence.end_token_ids:
        logits[torch.tensor(sorted(sequence.end_token_ids))] = float("-inf")
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(sequence.tokens)))
        found, penalty = logits[seen], float(params.repetition_penalty)  # a whole number may be too large for a tensor
        logits[seen] = torch.where(found > 0, found / penalty, found * penalty)
    if sequence.generated and (params.frequency_penalty or params.presence_penalty):
        counts = Counter(sequence.tokens[sequence.prompt_length :])
        times = torch.tensor(list(counts.values()), dtype=torch.float32)
        logits[torch.tensor(list(counts))] -= params.frequency_penalty * times + params.presence_penalty


def stuck_rows(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """Return the rows of ``logits`` [sequences, vocab] in which their requests, or grammars, leave no token."""
    restricted = [
        row
        for row, sequence in enumerate(sequences)
        if sequence.params.allowed_token_ids is not None or sequence.bad_words
    ]
    return [row for row in restricted if float(logits[row].amax()) == float("-inf")]


def _would_complete(sequence: Sequence, word: list[int]) -> bool:
    """Return whether the completion so far ends with all tokens of ``word`` except the last."""
    before = len(word) - 1
    return sequence.generated >= before and sequence.tokens[len(sequence.tokens) - before :] == word[:-1]
