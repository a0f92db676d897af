"""/v1/completions: the body's prompts, and the choices of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from medusa_runtime.engine.base import Delta

from ..faults import invalid
from .answer import Choice
from .body.parameters import Body, token_ids
from .logprobs import completion_logprobs

Prompt = str | tuple[int, ...]


def prompts(body: Body) -> list[Prompt]:
    """Return the prompts of a body: text, token ids, or a list of either. Raises ApiError 400."""
    value = body.get("prompt")
    expected = "text, a list of token ids, or a list of either"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise invalid("prompt", expected, value)
    if isinstance(value[0], int):
        return [token_ids(value, "prompt")]
    found: list[Prompt] = []
    for item in value:
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, list) and item:
            found.append(token_ids(item, "prompt"))
        else:
            raise invalid("prompt", expected, value)
    return found


@dataclass(frozen=True)
class CompletionFormatter:
    """Makes the choices of a completion's answer.

    ``logprobs`` is the number of alternatives, or None for no log-probabilities. ``echoes`` has the text to put before
    each choice, or is empty.
    """

    logprobs: int | None
    echoes: Sequence[str] = ()
    object: str = "text_completion"
    chunk_object: str = "text_completion"

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        echo = self._echo(index)
        logprobs = None
        if self.logprobs is not None:
            logprobs = completion_logprobs(choice.logprobs, len(echo), self.logprobs)
        return {
            "index": index,
            "text": echo + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def first_chunks(self, index: int) -> list[dict[str, Any]]:
        if not self._echo(index):
            return []
        return [{"index": index, "text": self._echo(index), "logprobs": None, "finish_reason": None}]

    def chunk(self, index: int, choice: Choice, delta: Delta) -> dict[str, Any]:
        logprobs = None
        if self.logprobs is not None:
            before = choice.logprobs[: len(choice.logprobs) - len(delta.logprobs)]
            offset = len(self._echo(index)) + sum(len(token.text) for token in before)
            logprobs = completion_logprobs(delta.logprobs, offset, self.logprobs)
        return {
            "index": index,
            "text": delta.text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _echo(self, index: int) -> str:
        return self.echoes[index] if self.echoes else ""
