"""Scores the tokens of prompts: the log-probabilities that the model gives to what it was given."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..serving.sequence import Span

_MOST_LOGITS = 1 << 23  # of which a float32 copy takes 32 MiB; those of a whole prompt would take gigabytes


def needs_scores(spans: list[Span]) -> bool:
    """Return whether a step has a prompt whose tokens are to be scored."""
    for span in spans:  # noqa: SIM110 - of every step, so it is written to be fast
        if span.sequence.prompt_scores is not None:
            return True
    return False


def most_rows(vocab_size: int) -> int:
    """Return of how many tokens the logits are computed at once."""
    return max(1, _MOST_LOGITS // vocab_size)


def scored_rows(spans: list[Span]) -> list[int]:
    """Return the rows, among those of all spans' tokens, whose logits ``score_prompts`` needs."""
    rows: list[int] = []
    row = 0
    for span in spans:
        for start, stop in _unscored(span, span.stop - span.start):
            rows += range(row + start - span.start, row + stop - span.start)
        row += span.stop - span.start
    return rows


def score_prompts(spans: list[Span], logits_of: Callable[[Tensor], Tensor], vocab_size: int) -> None:
    """Score the tokens that follow those of the spans in their prompts, unless they have been scored.

    ``logits_of`` returns the logits [rows, vocab_size] of some rows, int64 [rows], among the rows of all spans' tokens.
    The logits of ``most_rows`` tokens are in memory at once.
    """
    row = 0
    for span in spans:
        for start, stop in _unscored(span, most_rows(vocab_size)):
            first = row + start - span.start
            _add_scores(span, start, stop, logits_of(torch.arange(first, first + stop - start)))
        row += span.stop - span.start


def _unscored(span: Span, most: int) -> Iterator[tuple[int, int]]:
    """Yield ranges [start, stop) of at most ``most`` tokens of a span, whose next tokens have no scores."""
    sequence, start, stop = span
    if sequence.prompt_scores is not None:
        # A sequence that was preempted runs again from its beginning.
        start = max(start, sequence.prompt_scores.scored)
        stop = min(stop, sequence.prompt_length - 1)
        for at in range(start, stop, most):
            yield at, min(at + most, stop)


def _add_scores(span: Span, start: int, stop: int, logits: Tensor) -> None:
    """Add the scores of the tokens [start + 1, stop + 1), whose logits are those of the tokens before."""
    scores = span.sequence.prompt_scores
    assert scores is not None
    logits = logits.float()
    own = torch.tensor(span.sequence.tokens[start + 1 : stop + 1]).to(logits.device)[:, None]
    found = logits.gather(1, own)
    ranks = (logits >= found).sum(1, dtype=torch.int32)  # on a CPU a quarter of the time that int64 takes
    best, ids = logits.topk(scores.count)
    logprobs = torch.cat((found, best), 1) - logits.logsumexp(1, keepdim=True)
    scores.add(
        array("i", torch.cat((own, ids), 1).flatten().tolist()),
        array("f", logprobs.flatten().tolist()),
        array("i", ranks.tolist()),
    )
