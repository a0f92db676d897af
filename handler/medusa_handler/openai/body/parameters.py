"""SamplingParams from a request's JSON body. A bad value is refused with a 400 that names its field.

Fields and defaults are those of OpenAI's API reference; the extras (top_k, min_p, ignore_eos …) are vLLM's.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from medusa_runtime.engine.base import SamplingParams

from ...faults import invalid

Body = Mapping[str, Any]

_MOST_STOPS = 16
_MOST_BAD_WORDS = 128  # vLLM's limit
_MOST_ALLOWED = 1 << 20  # more than any vocabulary has
_MOST_LOGPROBS = 20
_LONGEST_INT = 2**63
_LARGEST = sys.float_info.max  # JSON has whole numbers beyond it


def number(
    body: Body, name: str, default: float, least: float | None = None, most: float | None = None, *, above: bool = False
) -> float:
    """Return a finite number in [least, most], or in (least, most] with ``above``; the default for null."""
    value = body.get(name)
    if value is None:
        return default
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
    if good and least is not None:
        good = value > least if above else value >= least
    if not good or (most is not None and value > most):
        low = "" if least is None else f" {'above' if above else 'of at least' if most is None else 'from'} {least:g}"
        high = "" if most is None else f" {'up to' if above else 'to'} {most:g}"
        raise invalid(name, f"a number{low}{high}", value)
    return float(value)


def integer(
    body: Body, name: str, default: int | None, least: int | None = None, most: int | None = None
) -> int | None:
    """Return a whole number in [least, most] that fits 64 bits; the default for null."""
    value = body.get(name)
    if value is None:
        return default
    good = isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LONGEST_INT
    if not good or (least is not None and value < least) or (most is not None and value > most):
        expected = "of at most 64 bits" if least is None else f"of at least {least}"
        raise invalid(name, f"a whole number {expected if most is None else f'from {least} to {most}'}", value)
    return int(value)


def count(body: Body, name: str, default: int, least: int = 0, most: int | None = None) -> int:
    value = integer(body, name, default, least, most)
    assert value is not None
    return value


def flag(body: Body, name: str, default: bool = False) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid(name, "true or false", value)
    return value


def sampling(
    body: Body,
    defaults: Mapping[str, float],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Return the sampling parameters of a body, with the checkpoint's ``defaults``. Raises ApiError 400."""
    body = {**defaults, **{name: value for name, value in body.items() if value is not None}}
    max_tokens = integer(defaults, "max_tokens", None, 1) if max_tokens is None else max_tokens
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=number(body, "temperature", 1.0, 0.0, 2.0),
        top_p=number(body, "top_p", 1.0, 0.0, 1.0, above=True),
        top_k=max(0, count(body, "top_k", 0, least=-1)),  # vLLM's clients say -1 for all
        min_p=number(body, "min_p", 0.0, 0.0, 1.0),
        repetition_penalty=number(body, "repetition_penalty", 1.0, 0.0, above=True),
        presence_penalty=number(body, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=number(body, "frequency_penalty", 0.0, -2.0, 2.0),
        seed=integer(body, "seed", None),
        stop=stop_strings(body, "stop"),
        stop_token_ids=token_ids(body.get("stop_token_ids") or [], "stop_token_ids"),
        include_stop_str_in_output=flag(body, "include_stop_str_in_output"),
        ignore_eos=flag(body, "ignore_eos"),
        min_tokens=count(body, "min_tokens", 0),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=flag(body, "skip_special_tokens", True),
        logit_bias=_logit_bias(body),
        allowed_token_ids=_allowed_token_ids(body),
        bad_words=_bad_words(body),
    )
    if max_tokens is not None and params.min_tokens > max_tokens:
        raise invalid("min_tokens", f"at most max_tokens ({max_tokens})", params.min_tokens)
    return params


def truncation(body: Body) -> tuple[int | None, str | None]:
    """Return to how many tokens inputs are cut, and at which side, if the body says so.

    -1 stands for the model's limit, and None for no cut. Raises ApiError 400.
    """
    most = integer(body, "truncate_prompt_tokens", None, -1)
    if most == 0:
        raise invalid("truncate_prompt_tokens", "-1 (the model's limit) or 1 and more", most)
    side = body.get("truncation_side")
    if side not in (None, "left", "right"):
        raise invalid("truncation_side", "left or right", side)
    return most, side


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    good = isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < _LONGEST_INT for item in value
    )
    if not good:
        raise invalid(name, "a list of token ids", value)
    return tuple(value)


def logprob_count(body: Body, name: str) -> int | None:
    return integer(body, name, None, 0, _MOST_LOGPROBS)


def prompt_logprob_count(body: Body) -> int | None:
    """Return ``prompt_logprobs``. As in vLLM, a stream does not have them."""
    value = logprob_count(body, "prompt_logprobs")
    if value is not None and flag(body, "stream"):
        raise invalid("prompt_logprobs", "no stream with it, since a stream does not have them", value)
    return value


def stop_strings(body: Body, name: str) -> tuple[str, ...]:
    value = body.get(name)
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise invalid(name, "a string or a list of strings, none of them empty", value)
    if len(stops) > _MOST_STOPS:
        raise invalid(name, f"at most {_MOST_STOPS} strings", len(stops))
    return tuple(stops)


def _allowed_token_ids(body: Body) -> tuple[int, ...] | None:
    value = body.get("allowed_token_ids")
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise invalid("allowed_token_ids", "a list of at least one token id", value)
    if len(value) > _MOST_ALLOWED:
        raise invalid("allowed_token_ids", f"at most {_MOST_ALLOWED} ids", len(value))
    return token_ids(value, "allowed_token_ids")


def _bad_words(body: Body) -> tuple[str, ...]:
    value = body.get("bad_words")
    if value is None:
        return ()
    if not isinstance(value, list):
        raise invalid("bad_words", "a list of strings, none of them empty", value)
    if len(value) > _MOST_BAD_WORDS:
        raise invalid("bad_words", f"at most {_MOST_BAD_WORDS} strings", len(value))
    if not all(isinstance(word, str) and word for word in value):
        raise invalid("bad_words", "a list of strings, none of them empty", value)
    return tuple(value)


def _logit_bias(body: Body) -> dict[int, float] | None:
    value = body.get("logit_bias")
    if value is None or value == {}:
        return None
    try:
        bias = {int(token): number({"logit_bias": by}, "logit_bias", 0.0, -100, 100) for token, by in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise invalid("logit_bias", "an object of token ids and numbers", value) from None
    return bias
