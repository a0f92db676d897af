"""Lets a core continue a request that another core began. The same tokens follow as without the move.

vLLM's scheduler recomputes a preempted request from its prompt and its tokens so far. A request from another core is
made to look preempted: its state is put where the worker keeps those of its own requests, and as many random numbers
are drawn as its tokens have used. So penalties, limits and grammars count from the request's real beginning.
"""

from __future__ import annotations

from typing import Any

import torch
from medusa_runtime.engine.serving.sequence import Sequence

from .core_request import core_request
from .version import MissingPartError

_DRAWN_BELOW = 1 << 31


def resume(core: Any, sequence: Sequence, *, vocab_size: int) -> None:
    """Add a request with its tokens so far to a core in this process, before its next step.

    Raises MissingPartError in a version of vLLM that keeps requests in another form, and ValueError and TypeError, as
    adding a request does.
    """
    so_far = sequence.tokens[sequence.prompt_length :]
    request, _ = core.preprocess_add_request(core_request(sequence, vocab_size=vocab_size))
    if so_far:
        runner = _runner(core)
        request.append_output_token_ids(so_far)
        _follow_grammar(request, so_far)
        from vllm.v1.request import RequestStatus

        request.status = RequestStatus.PREEMPTED
        runner.requests[sequence.id] = _state(request, runner.device, so_far)
    core.add_request(request)


def _runner(core: Any) -> Any:
    """Return the model runner of a core whose worker is in this process."""
    try:
        runner = core.model_executor.driver_worker.worker.model_runner
        known = isinstance(runner.requests, dict) and not core.vllm_config.use_v2_model_runner
    except AttributeError as error:
        raise MissingPartError(f"a core's requests are not where they are expected ({error})") from error
    if not known:
        raise MissingPartError("this version's model runner keeps requests in another way")
    return runner


def _state(request: Any, device: torch.device, so_far: list[int]) -> Any:
    """Return the state that the worker keeps of a preempted request."""
    from vllm.sampling_params import SamplingType
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    params, generator = request.sampling_params, None
    if params.sampling_type == SamplingType.RANDOM_SEED:
        generator = torch.Generator(device=device)
        generator.manual_seed(params.seed)
        for _ in so_far:  # as its sampler for CPUs does for each token
            torch.randint(0, _DRAWN_BELOW, (1,), generator=generator, dtype=torch.long)
    return CachedRequestState(
        req_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        mm_features=[],
        sampling_params=params,
        generator=generator,
        block_ids=(),
        num_computed_tokens=0,
        output_token_ids=list(so_far),
    )


def _follow_grammar(request: Any, so_far: list[int]) -> None:
    """Advance a request's grammar over the tokens so far."""
    structured = request.structured_output_request
    if structured is None:
        return
    made = structured._grammar
    grammar = made.result() if hasattr(made, "result") else made
    structured.grammar = grammar
    if not grammar.accept_tokens(request.request_id, so_far):
        raise ValueError("the tokens so far do not follow the request's grammar")


__all__ = ["resume"]
