"""Checks whether a request can be served. An error names the parameter, what is accepted, and what was found."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ...errors import ContextLengthError, RequestError, json_excerpt
from ..base import EngineInfo, SamplingParams

_MOST_LOGPROBS = 20
_LARGEST = sys.float_info.max  # JSON allows larger whole numbers, which no float can hold
_MOST_PROMPT_LOGPROBS = 1 << 20  # with their texts, each takes up to 100 bytes of an answer
# The most characters of a text, unless the model's context may hold more: each takes 130 to 500 bytes for a while.
_MOST_CHARACTERS = 1 << 20
_CHARACTERS_PER_TOKEN = 8  # of a text that is to fill a context: twice what languages have
_MOST_STOPS = 32
_MOST_BAD_WORDS = 128  # vLLM's limit
_LONGEST_BAD_WORD = 1024  # characters
_MOST_TOP_K = 1 << 31
_NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("0 or more", lambda x: x >= 0),
    "top_p": ("a number in (0, 1]", lambda x: 0 < x <= 1),
    "min_p": ("a number in [0, 1]", lambda x: 0 <= x <= 1),
    "repetition_penalty": ("a number above 0", lambda x: x > 0),
    "presence_penalty": ("a number in [-2, 2]", lambda x: -2 <= x <= 2),
    "frequency_penalty": ("a number in [-2, 2]", lambda x: -2 <= x <= 2),
}


def most_characters(most_tokens: int) -> int:
    """Return how many characters a text may have that is tokenized for a context of ``most_tokens``."""
    return max(_MOST_CHARACTERS, _CHARACTERS_PER_TOKEN * most_tokens)


def accepts(name: str, value: float) -> bool:
    """Return whether the sampling parameter ``name``, which is a number, may have this value in a request."""
    try:
        if name == "top_k":
            _check_top_k(value)
        elif name == "max_tokens":
            _count(name, value, 1, None, "1 or more")
        else:
            _number(name, value, *_NUMBERS[name])
    except RequestError:
        return False
    return True


def check_prompt(prompt: list[int], info: EngineInfo, *, room: int = 1) -> None:
    """Check a prompt's token ids.

    Raises RequestError for an empty prompt and for ids outside the vocabulary, and ContextLengthError for a prompt that
    leaves no room for ``room`` tokens.
    """
    if not prompt:
        raise RequestError("prompt: expected at least one token, found an empty prompt", "prompt")
    if len(prompt) + room > info.max_model_len:
        without = "which leaves no room for an answer" if room else "which is more"
        raise ContextLengthError(
            f"this model's maximum context length is {info.max_model_len} tokens, and the prompt has {len(prompt)}, "
            f"{without}; expected a shorter prompt",
            "prompt",
        )
    check_token_ids("prompt", prompt, info)


def check_token_ids(name: str, token_ids: list[int], info: EngineInfo) -> None:
    """Raise RequestError, naming the parameter ``name``, if an id is not in the vocabulary."""
    for token in token_ids:
        _token(name, token, info)


def check_params(params: SamplingParams, info: EngineInfo, *, has_text: bool) -> None:
    """Check sampling parameters. Raises RequestError. ``has_text``: the checkpoint has a tokenizer.json."""
    for name, (accepted, good) in _NUMBERS.items():
        _number(name, getattr(params, name), accepted, good)
    _check_top_k(params.top_k)
    scores = info.engine == "torch"  # others' tokens are scored by vLLM's own HTTP routes
    _count("max_tokens", params.max_tokens, 0 if scores else 1, None, f"{0 if scores else 1} or more")
    if params.max_tokens is not None and params.max_tokens > info.max_model_len:
        # Only more than the whole context is an error. Otherwise, as in vLLM, it is cut to the room that is left.
        raise ContextLengthError(
            f"this model's maximum context length is {info.max_model_len} tokens, and {params.max_tokens} were asked "
            "for; expected fewer",
            "max_tokens",
        )
    _count("min_tokens", params.min_tokens, 0, params.max_tokens, "0 or more, and at most max_tokens")
    _count("logprobs", params.logprobs, 0, _MOST_LOGPROBS, f"between 0 and {_MOST_LOGPROBS}")
    if params.prompt_logprobs is not None and not scores:
        raise _error("prompt_logprobs", "to be absent (only vLLM's own HTTP routes give them)", params.prompt_logprobs)
    _count("prompt_logprobs", params.prompt_logprobs, 0, _MOST_LOGPROBS, f"between 0 and {_MOST_LOGPROBS}")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > info.vocab_size:
            raise _error(name, f"at most the vocabulary's {info.vocab_size}", getattr(params, name))
    if params.seed is not None and not (isinstance(params.seed, int) and -(1 << 63) <= params.seed < 1 << 64):
        raise _error("seed", "a whole number of at most 64 bits", params.seed)  # the limit of torch's generators
    _check_stops(params, info, has_text)
    _check_allowed(params, info)
    _check_bad_words(params, has_text)
    if params.structured_outputs is not None:
        if not all(isinstance(part, str) for part in params.structured_outputs):
            raise _error("structured_outputs", "a kind and a text", params.structured_outputs)
        if params.min_tokens:
            raise _error(
                "min_tokens", "0 with structured outputs, which end where their grammar does", params.min_tokens
            )
        if params.ignore_eos:
            raise _error("ignore_eos", "false with structured outputs, which end where their grammar does", True)
    for token, bias in (params.logit_bias or {}).items():
        _token("logit_bias", token, info)
        _number("logit_bias", bias, "values in [-100, 100]", lambda x: -100 <= x <= 100)


def check_prompt_logprobs(params: SamplingParams, prompt_tokens: int) -> None:
    """Raise RequestError if a prompt is so long that its log-probabilities with all alternatives are too many."""
    if params.prompt_logprobs and prompt_tokens * (params.prompt_logprobs + 1) > _MOST_PROMPT_LOGPROBS:
        most = _MOST_PROMPT_LOGPROBS // prompt_tokens - 1
        raise _error(
            "prompt_logprobs", f"at most {max(most, 0)} for a prompt of {prompt_tokens} tokens", params.prompt_logprobs
        )


def _check_stops(params: SamplingParams, info: EngineInfo, has_text: bool) -> None:
    if len(params.stop) > _MOST_STOPS:
        raise _error("stop", f"at most {_MOST_STOPS} strings", len(params.stop))
    for stop in params.stop:
        if not isinstance(stop, str) or not stop:
            raise _error("stop", "strings that are not empty", stop)
    if params.stop and not has_text:
        raise RequestError(
            "stop: this checkpoint has no tokenizer.json, so its tokens have no text; use stop_token_ids instead",
            "stop",
        )
    for token in params.stop_token_ids:
        _token("stop_token_ids", token, info)


def _check_allowed(params: SamplingParams, info: EngineInfo) -> None:
    ids = params.allowed_token_ids
    if ids is None:
        return
    if not ids or len(ids) > info.vocab_size:
        raise _error("allowed_token_ids", f"between 1 and the vocabulary's {info.vocab_size} ids", len(ids))
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= info.vocab_size:
        for token in ids:  # there may be many, so only an error looks at each
            _token("allowed_token_ids", token, info)


def _check_bad_words(params: SamplingParams, has_text: bool) -> None:
    if len(params.bad_words) > _MOST_BAD_WORDS:
        raise _error("bad_words", f"at most {_MOST_BAD_WORDS} words", len(params.bad_words))
    for word in params.bad_words:
        if not isinstance(word, str) or not word or len(word) > _LONGEST_BAD_WORD:
            raise _error("bad_words", f"words of 1 to {_LONGEST_BAD_WORD} characters", word)
    if params.bad_words and not has_text:
        raise RequestError(
            "bad_words: this checkpoint has no tokenizer.json, so its tokens have no text; use logit_bias instead",
            "bad_words",
        )


def _number(name: str, value: Any, accepted: str, good: Callable[[float], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _LARGEST or not good(value):
        raise _error(name, accepted, value)


def _check_top_k(value: float) -> None:
    _count("top_k", value, -1, _MOST_TOP_K, "0 or -1 (all tokens), or 1 and more")


def _count(name: str, value: Any, least: int, most: int | None, accepted: str) -> None:
    if value is None and name in ("max_tokens", "logprobs", "prompt_logprobs"):
        return
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        raise _error(name, accepted, value)


def _token(name: str, token: Any, info: EngineInfo) -> None:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < info.vocab_size:
        raise _error(name, f"token ids between 0 and {info.vocab_size - 1}", token)


def _error(name: str, accepted: str, found: Any) -> RequestError:
    return RequestError(f"{name}: expected {accepted}, found {json_excerpt(found)}", name)
