"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from medusa_runtime.engine.base import TokenLogprob

_LEAST = -9999.0  # JSON has no infinity; OpenAI sends this for it


def completion_logprobs(tokens: Sequence[TokenLogprob], offset: int, alternatives: int) -> dict[str, Any]:
    """Return the form of /v1/completions. ``offset`` is where the first token begins in the choice's text."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [
            # The chosen token is always listed, even if it is not one of the likeliest.
            {text: _finite(logprob) for _, text, logprob in token.top[:alternatives]}
            | {token.text: _finite(token.logprob)}
            if alternatives
            else None
            for token in tokens
        ],
        "text_offset": offsets,
    }


def chat_logprobs(tokens: Sequence[TokenLogprob], alternatives: int) -> dict[str, Any]:
    """Return the form of /v1/chat/completions."""
    return {
        "content": [
            {
                **_entry(token.text, token.logprob),
                "top_logprobs": [_entry(text, logprob) for _, text, logprob in token.top[:alternatives]],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _finite(logprob: float) -> float:
    return max(_LEAST, logprob) if logprob == logprob else _LEAST
