"""Translates our requests to vLLM's."""

from __future__ import annotations

import time
from typing import Any

from medusa_runtime.engine.base import SamplingParams
from medusa_runtime.engine.serving.sequence import Sequence

from .structured import vllm_params

CLIENT = 1  # the client of our requests, in vLLM's core; its own front end is client 0


def core_request(sequence: Sequence, *, vocab_size: int) -> Any:
    """Return an EngineCoreRequest. It has no stop strings: we make the text, and vLLM sees only tokens."""
    prompt = sequence.tokens[: sequence.prompt_length]
    sampling = _sampling(sequence.params, sequence, vocab_size)
    return request_of(sequence.id, prompt, sampling, cache_salt=sequence.request.cache_salt)


def request_of(
    request_id: str, prompt_token_ids: list[int], sampling_params: Any, *, cache_salt: str | None = None
) -> Any:
    """Return an EngineCoreRequest with vLLM's own SamplingParams."""
    from vllm.v1.engine import EngineCoreRequest

    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        mm_features=None,
        sampling_params=sampling_params,
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=cache_salt,
        data_parallel_rank=None,
        client_index=CLIENT,
    )


def _sampling(params: SamplingParams, sequence: Sequence, vocab_size: int) -> Any:
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmParams

    sampling = VllmParams(
        max_tokens=sequence.limit - sequence.prompt_length,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=max(params.top_k, 0),
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed,
        stop_token_ids=list(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        logprobs=None if params.logprobs is None else min(params.logprobs, vocab_size),
        logit_bias=params.logit_bias or None,
        allowed_token_ids=None if params.allowed_token_ids is None else list(params.allowed_token_ids),
        bad_words=list(params.bad_words),
        structured_outputs=None if params.structured_outputs is None else vllm_params(params.structured_outputs),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    sampling._bad_words_token_ids = sequence.bad_words or None  # vLLM's front end reads them with its own tokenizer
    # vLLM's own front end passes the tokens that end a text in the same way.
    sampling.update_from_generation_config({"eos_token_id": sorted(sequence.eos_token_ids)})
    return sampling


__all__ = ["CLIENT", "core_request", "request_of"]
