"""Turns a sampled token into the delta that the caller gets, and decides whether the sequence ends with it."""

from __future__ import annotations

from ..base import Delta, PromptLogprobs, TokenLogprob
from .sequence import SampledToken, Sequence
from .token_texts import BEFORE_TOKENS
from .tokenizer import Tokenizer


def advance(sequence: Sequence, sampled: SampledToken, tokenizer: Tokenizer) -> Delta:
    """Append a token to its sequence, and return the delta. It has a ``finish_reason`` if the sequence ends.

    With ``max_tokens=0`` the token is dropped. The first delta has the prompt's log-probabilities, if asked for.
    As in vLLM, a token that ends a sequence is among the delta's token ids but not in its text. With
    ``include_stop_str_in_output``, a token of ``stop_token_ids`` is in the text too.
    """
    if sequence.prompt_scores is not None:
        prompt_logprobs = take_prompt_logprobs(sequence)
        return advance(sequence, sampled, tokenizer)._replace(prompt_logprobs=prompt_logprobs)
    token, params, transcript = sampled.token, sequence.params, sequence.transcript
    if params.max_tokens == 0:
        return final_delta(sequence, "length")
    sequence.tokens.append(token)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    if token in sequence.end_token_ids:
        finish_reason = "stop"
        text = ""
        if token not in sequence.eos_token_ids:
            stop_reason = token
            if params.include_stop_str_in_output:
                text = transcript.push(token)
        text += transcript.finish()
    else:
        text = transcript.push(token, may_stop=sequence.generated > params.min_tokens)
        if transcript.stopped_by is None and len(sequence.tokens) >= sequence.limit:
            finish_reason = "length"
            text += transcript.finish()
    if transcript.stopped_by is not None:
        finish_reason, stop_reason = "stop", transcript.stopped_by
    logprobs = () if sampled.logprob is None else (_logprob(sampled, sampled.logprob, sequence, tokenizer),)
    return Delta(
        sequence.id,
        text,
        (token,),
        logprobs,
        finish_reason,
        stop_reason,
        sequence.prompt_length,
        sequence.generated,
        cached_tokens=sequence.cached_tokens or 0,
    )


def take_prompt_logprobs(sequence: Sequence) -> PromptLogprobs | None:
    """Return the log-probabilities of a computed prompt, the first time; None if the request asked for none.

    They have no texts. The engine's ``with_texts`` makes them, in another thread.
    """
    scores, sequence.prompt_scores = sequence.prompt_scores, None
    return None if scores is None else scores.logprobs(sequence.tokens)


def final_delta(sequence: Sequence, reason: str, error: tuple[str, str] | None = None) -> Delta:
    """Return the last delta of a sequence that is ended from outside. ``error`` is (code, message)."""
    return Delta(
        sequence.id,
        "",
        finish_reason=reason,
        prompt_tokens=sequence.prompt_length,
        completion_tokens=sequence.generated,
        error=error,
        cached_tokens=sequence.cached_tokens or 0,
    )


def _logprob(sampled: SampledToken, logprob: float, sequence: Sequence, tokenizer: Tokenizer) -> TokenLogprob:
    before = sequence.tokens[-1 - BEFORE_TOKENS : -1]
    texts: dict[int, str] = {}
    if tokenizer.present:
        texts = tokenizer.texts.after(before, [sampled.token, *(token for token, _ in sampled.top)])
    top = tuple((token, texts.get(token, ""), value) for token, value in sampled.top)
    return TokenLogprob(sampled.token, texts.get(sampled.token, ""), logprob, top)
