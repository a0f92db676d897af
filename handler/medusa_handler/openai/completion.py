"""/v1/completions: the body's prompts, and the choices of the answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from medusa_runtime.engine.base import Delta, PromptLogprobs, TokenLogprob

from ..faults import invalid
from .answer import Choice
from .body.parameters import Body, token_ids
from .logprobs import completion_logprobs, prompt_logprobs
from .token_ids import NO_TOKEN_IDS, Prompt, TokenIds

_MOST_IN_CHUNK = 4096  # log-probabilities; each takes about 35 bytes


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
    the prompt's tokens. ``echoes`` has the text to put before each choice, or is empty. ``_begun`` has the choices
    whose prompt's token ids a stream has sent.
    """

    logprobs: int | None
    echoes: Sequence[str] = ()
    prompt_logprobs: int | None = None
    token_ids: TokenIds = NO_TOKEN_IDS
    _begun: set[int] = field(default_factory=set)
    object: str = "text_completion"
    chunk_object: str = "text_completion"

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        found = choice.prompt_logprobs
        logprobs = None
        if self.logprobs is not None:
            tokens = list(self._tokens(found, choice.logprobs))
            logprobs = completion_logprobs(tokens, 0, self.logprobs, as_ids=self.token_ids.as_tokens)
        ids: dict[str, Any] = {}
        if choice.token_ids is not None:
            ids = {"token_ids": choice.token_ids, "prompt_token_ids": self.token_ids.prompts[index]}
        return {
            "index": index,
            "text": self._echo(index) + choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **ids,
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

    def of_prompt(self) -> dict[str, Any]:
        return {}

    def first_chunks(self, index: int) -> list[dict[str, Any]]:
        if not self._echo(index) or self.logprobs is not None:  # with the first token come those of the prompt
            return []
        return [{"index": index, "text": self._echo(index), "logprobs": None, "finish_reason": None}]

    def chunks(self, index: int, choice: Choice, delta: Delta) -> Iterator[dict[str, Any]]:
        """Yield the chunk for ``delta``. A long prompt with log-probabilities is cut into several."""
        text = self._echo(index) + delta.text if delta.prompt_logprobs is not None else delta.text
        if self.logprobs is None:
            yield _chunk(index, text, None, delta) | self._ids(index, delta)
            return
        tokens = iter(self._tokens(delta.prompt_logprobs, delta.logprobs))
        most = _MOST_IN_CHUNK // (1 + self.logprobs)
        part, begin = list(islice(tokens, most)), 0
        while following := list(islice(tokens, most)):
            end = begin + sum(len(token.text) for token in part)
            yield _chunk(index, text[begin:end], self._part(choice, part), None)
            part, begin = following, end
        yield _chunk(index, text[begin:], self._part(choice, part), delta) | self._ids(index, delta)

    def _ids(self, index: int, delta: Delta) -> dict[str, Any]:
        """Return the token ids of a chunk, the first time with those of the prompt."""
        if not self.token_ids.returned:
            return {}
        first = {} if index in self._begun else {"prompt_token_ids": self.token_ids.prompts[index]}
        self._begun.add(index)
        return {"token_ids": list(delta.token_ids), **first}

    def _part(self, choice: Choice, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Return the log-probabilities of the next tokens of a choice."""
        found = completion_logprobs(tokens, choice.offset, self.logprobs or 0, as_ids=self.token_ids.as_tokens)
        choice.offset += sum(len(token.text) for token in tokens)
        return found

    def _tokens(self, prompt: PromptLogprobs | None, generated: Sequence[TokenLogprob]) -> Iterable[TokenLogprob]:
        """Return the tokens of a choice's text, which begins with the prompt if it is echoed."""
        return generated if prompt is None or not self.echoes else chain(prompt.tokens(), generated)

    def _echo(self, index: int) -> str:
        return self.echoes[index] if self.echoes else ""


def _chunk(index: int, text: str, logprobs: dict[str, Any] | None, delta: Delta | None) -> dict[str, Any]:
    """Return a chunk. ``delta`` ends with it; None if there is more of it."""
    return {
        "index": index,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": None if delta is None else delta.finish_reason,
        "stop_reason": None if delta is None else delta.stop_reason,
    }
