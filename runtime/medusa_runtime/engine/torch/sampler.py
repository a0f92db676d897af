"""Sampling: chooses tokens by their logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ..serving.sequence import NO_TOKEN, SampledToken, Sequence
from .penalties import adjust, stuck_rows

_CANDIDATES = 1024  # how many of the most likely tokens are tried before the whole vocabulary is sorted


GREEDY_BELOW = 1e-5  # lower temperatures are greedy: only the most likely token would have any probability


def sample(logits: Tensor, sequences: list[Sequence]) -> list[SampledToken]:
    """Choose a token for each row of ``logits`` [sequences, vocab].

    Log-probabilities are those of the model, before penalties and temperature, as in vLLM.
    """
    plain = all(_is_plain(sequence) for sequence in sequences)
    stuck: list[int] = []
    raw = logits
    if not plain:
        logits = logits.float()
        if logits is raw:
            logits = logits.clone()
        for row, sequence in zip(logits, sequences, strict=True):
            adjust(row, sequence)
        stuck = stuck_rows(logits, sequences)
    tokens = logits.argmax(-1)
    random = [row for row, sequence in enumerate(sequences) if sequence.params.temperature >= GREEDY_BELOW]
    if random:
        rows = torch.tensor(random)
        drawn = _draw(logits[rows].float(), [sequences[row] for row in random])
        tokens = tokens.index_copy(0, rows, drawn)
    chosen: list[int] = tokens.tolist()
    for row in stuck:
        chosen[row] = NO_TOKEN
    return [
        SampledToken(token)
        if sequence.params.logprobs is None or token == NO_TOKEN
        else _with_logprobs(raw[row], token, sequence.params.logprobs)
        for row, (token, sequence) in enumerate(zip(chosen, sequences, strict=True))
    ]


def _is_plain(sequence: Sequence) -> bool:
    return sequence.is_plain and sequence.generated >= sequence.params.min_tokens


def _draw(logits: Tensor, sequences: list[Sequence]) -> Tensor:
    """Sample each row after temperature, min-p, top-k and top-p, in this order."""
    params = [sequence.params for sequence in sequences]
    uniform = torch.tensor([sequence.random_stream.draw() for sequence in sequences])
    # float: a temperature may be a whole number that is too large for an integer tensor.
    probs = torch.softmax(logits / torch.tensor([float(p.temperature) for p in params])[:, None], -1)
    if any(p.min_p > 0 for p in params):
        least = probs.amax(-1, keepdim=True) * torch.tensor([p.min_p for p in params])[:, None]
        probs = torch.where(probs < least, 0, probs)
    drawn = torch.empty(len(params), dtype=torch.long)
    cut = [row for row, p in enumerate(params) if p.top_k > 0 or p.top_p < 1]
    whole = [row for row, p in enumerate(params) if not (p.top_k > 0 or p.top_p < 1)]
    if whole:
        rows = torch.tensor(whole)
        drawn[rows] = _pick(probs[rows], uniform[rows])
    for row in cut:
        drawn[row] = _pick_from_top(probs[row], uniform[row : row + 1], params[row].top_k, params[row].top_p)
    return drawn


def _pick_from_top(probs: Tensor, uniform: Tensor, top_k: int, top_p: float) -> Tensor:
    """Draw from the ``top_k`` most likely tokens (0: all) of ``probs`` [vocab], cut to the fewest that reach ``top_p``.

    Returns a tensor with the token id.
    """
    size = probs.shape[0]
    total = float(probs.sum())
    limit = min(top_k, size) if top_k > 0 else size
    count = limit if top_p >= 1 else min(limit, _CANDIDATES)
    best, ids = probs.topk(count)
    if count < limit and float(best.sum()) < top_p * total:
        best, ids = probs.topk(limit)
    if top_p < 1:
        if limit < size:
            total = float(best.sum()) if best.shape[0] == limit else float(probs.topk(limit)[0].sum())
        before = best.cumsum(0) - best
        best = torch.where(before >= top_p * total, 0, best)
    return ids[_pick(best[None], uniform)[0]]


def _pick(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw an index for each row of ``weights`` [rows, n], with probabilities in proportion to them.

    It is where the running sum passes the row's random number in ``uniform`` [rows], times the whole sum.
    """
    sums = weights.cumsum(-1)
    picked = torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)[:, 0]
    # Rounding can put a random number just below 1 behind the last weight.
    return torch.where(picked < weights.shape[1], picked, weights.argmax(-1))


def _with_logprobs(logits: Tensor, token: int, count: int) -> SampledToken:
    logprobs = torch.log_softmax(logits.float(), -1)
    values, ids = logprobs.topk(count)
    return SampledToken(token, float(logprobs[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
