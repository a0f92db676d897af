"""/v1/completions: the body's prompts, and the choices of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from medusa_runtime.engine.base import Delta, PromptLogprobs, TokenLogprob

from ..faults import invalid
from .answer import Choice
from .body.parameters import Body, token_ids
from .logprobs import completion_logprobs, prompt_logprobs

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

    ``logprobs`` is the number of alternatives, or None for no log-probabilities; ``prompt_logprobs`` is that of each of
    the prompt's tokens. ``echoes`` has the text to put before each choice, or is empty.
    """

    logprobs: int | None
    echoes: Sequence[str] = ()
    prompt_logprobs: int | None = None
    object: str = "text_completion"
    chunk_object: str = "text_completion"

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        found = choice.prompt_logprobs
        logprobs = None
        if self.logprobs is not None:
            logprobs = completion_logprobs(self._tokens(found, choice.logprobs), 0, self.logprobs)
        return {
            "index": index,
            "text": self._echo(index) + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        } | (
            {}
            if self.prompt_logprobs is None
            else {"prompt_logprobs": None if found is None else prompt_logprobs(found, self.prompt_logprobs)}
        )

    def prompt_copies(self, choices: int) -> int:
        echoed = bool(self.echoes) and self.logprobs is not None
        return choices * (echoed + (self.prompt_logprobs is not None))

    def beside(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {}

    def first_chunks(self, index: int) -> list[dict[str, Any]]:
        if not self._echo(index) or self.logprobs is not None:  # with the first token come those of the prompt
            return []
        return [{"index": index, "text": self._echo(index), "logprobs": None, "finish_reason": None}]

    def chunk(self, index: int, choice: Choice, delta: Delta) -> dict[str, Any]:
        logprobs, text = None, delta.text
        if self.logprobs is not None:
            tokens = self._tokens(delta.prompt_logprobs, delta.logprobs)
            logprobs = completion_logprobs(tokens, choice.offset, self.logprobs)
            choice.offset += sum(len(token.text) for token in tokens)
            if delta.prompt_logprobs is not None:
                text = self._echo(index) + text
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
        }

    def _tokens(self, prompt: PromptLogprobs | None, generated: Sequence[TokenLogprob]) -> Sequence[TokenLogprob]:
        """Return the tokens of a choice's text, which begins with the prompt if it is echoed."""
        return generated if prompt is None or not self.echoes else [*prompt.tokens(), *generated]

    def _echo(self, index: int) -> str:
        return self.echoes[index] if self.echoes else ""
