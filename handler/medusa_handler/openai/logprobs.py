"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from medusa_runtime.engine.base import PromptLogprobs, TokenLogprob

_LEAST = -9999.0  # JSON has no infinity; OpenAI sends this for it


def completion_logprobs(
    tokens: Sequence[TokenLogprob], offset: int, alternatives: int, *, as_ids: bool = False
) -> dict[str, Any]:
    """Return the form of /v1/completions. ``offset`` is where the first token begins in the choice's text."""

    def shown(token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if as_ids else text

    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": [shown(token.token_id, token.text) for token in tokens],
        "token_logprobs": [None if token.logprob is None else _finite(token.logprob) for token in tokens],
        "top_logprobs": [
            # The token itself is always listed, even if it is not one of the likeliest.
            None
            if token.logprob is None
            else {shown(token.token_id, token.text): _finite(token.logprob)}
            | {shown(number, text): _finite(logprob) for number, text, logprob in token.top[:alternatives]}
            for token in tokens
        ],
        "text_offset": offsets,
    }


def chat_logprobs(tokens: Sequence[TokenLogprob], alternatives: int, *, as_ids: bool = False) -> dict[str, Any]:
    """Return the form of /v1/chat/completions."""

    def entry(token_id: int, text: str, logprob: float) -> dict[str, Any]:
        token = {"token": f"token_id:{token_id}"} if as_ids else {}
        return _entry(text, logprob) | token

    return {
        "content": [
            {
                **entry(token.token_id, token.text, token.logprob or 0.0),
                "top_logprobs": [entry(*alternative) for alternative in token.top[:alternatives]],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def prompt_logprobs(found: PromptLogprobs, alternatives: int) -> list[dict[str, Any] | None]:
    """Return vLLM's form of a prompt's log-probabilities, by token id. The first token has none."""
    _, *others = found.tokens()
    listed: list[dict[str, Any] | None] = [None]
    for token, rank in zip(others, found.ranks, strict=True):
        own = (token.token_id, token.text, token.logprob)
        entries = ((rank, own), *enumerate(token.top[:alternatives], 1))
        listed.append(
            {
                str(number): {"logprob": _finite(logprob or 0.0), "rank": place, "decoded_token": text}
                for place, (number, text, logprob) in entries
            }
        )
    return listed


def _entry(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _finite(logprob: float) -> float:
    return max(_LEAST, logprob) if logprob == logprob else _LEAST
