"""The objects of one answer, made from an engine's deltas: a whole answer, or the chunks of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from medusa_runtime.engine.base import Delta, PromptLogprobs, TokenLogprob

from ..faults import ApiError, retry_after
from ..logprob_budget import LogprobBudget
from .reasoning import ReasoningParser
from .token_ids import TokenIds

_MOST_LOGPROBS = 1_000_000  # each takes 170 bytes until it is sent, or 300 of a prompt


@dataclass
class Choice:
    """The text and tokens that one sequence has produced so far.

    With a ``parser``, ``text`` is what is not reasoning, and ``is_reasoning`` says whether the last delta was a part of
    the reasoning, with its tags. ``pieces`` are the reasoning and the other text of the last delta, in order.
    ``offset`` is where the next token begins in the text of a stream's tokens. ``token_ids`` is None unless the answer
    has them.
    """

    parser: ReasoningParser | None = None
    text: str = ""
    reasoning: str = ""
    reasoning_tokens: int = 0
    is_reasoning: bool = False
    pieces: Sequence[tuple[str, str]] = ()
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    offset: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    counted: int = 0
    token_ids: list[int] | None = None

    def add(self, delta: Delta) -> None:
        self._add_text(delta)
        self.logprobs.extend(delta.logprobs)
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop_reason = delta.stop_reason if delta.stop_reason is not None else self.stop_reason
        self.prompt_tokens = max(self.prompt_tokens, delta.prompt_tokens)
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        self.counted += len(delta.token_ids)
        if self.token_ids is not None:
            self.token_ids.extend(delta.token_ids)
        self.completion_tokens = max(self.counted, delta.completion_tokens)

    def _add_text(self, delta: Delta) -> None:
        if self.parser is None:
            self.text += delta.text
            self.pieces = (("", delta.text),)
            return
        was_inside, was_reasoning = self.parser.inside, self.parser.reasoning
        self.pieces = self.parser.push(delta.text, last=delta.finish_reason is not None)
        for reasoning, text in self.pieces:
            self.reasoning += reasoning
            self.text += text
        self.is_reasoning = was_inside or self.parser.inside
        if was_reasoning and self.parser.reasoning:  # none of the tags, which are one token each where models reason
            self.reasoning_tokens += len(delta.token_ids)

    @property
    def is_answering(self) -> bool:
        """Whether the reasoning has ended, or there is none, so that new text belongs to the answer."""
        return self.parser is None or self.parser.ended

    def forget(self) -> None:
        """Forget the text and log-probabilities so far, which a stream has sent."""
        self.text = self.reasoning = ""
        self.logprobs.clear()
        self.prompt_logprobs = None
        if self.token_ids:
            self.token_ids.clear()

    @property
    def mean_logprob(self) -> float:
        return sum(token.logprob or 0.0 for token in self.logprobs) / max(1, len(self.logprobs))


class LogprobLimit:
    """How many log-probabilities one answer may keep, and all answers of a ``budget``. Give them back with ``close``.

    An error has this ``message``, and the name of the field.
    """

    def __init__(self, param: str, message: str, budget: LogprobBudget) -> None:
        self._param = param
        self._message = message
        self._budget = budget
        self._count = self._taken = 0

    def add(self, delta: Delta, prompt_copies: int = 1) -> None:
        """Count those of a delta, and its prompt's as often as the answer has them.

        Raises ApiError 400 if one answer has too many, and 503 if others leave too little room.
        """
        self._count += sum(1 + len(token.top) for token in delta.logprobs)
        if delta.prompt_logprobs is not None:
            self._count += prompt_copies * len(delta.prompt_logprobs.token_ids)
        if self._count > _MOST_LOGPROBS:
            expected = f"{self._param}: expected at most {_MOST_LOGPROBS:,} log-probabilities"
            raise ApiError(400, f"{expected} {self._message}", param=self._param)
        if not self._budget.take(self, self._count - self._taken):
            used, most = self._budget.used, self._budget.most
            found = f"the answers that are being made keep {used:,} of the {most:,} log-probabilities that they may"
            text = f"{self._param}: {found}; try again later, or ask for fewer"
            raise ApiError(503, text, code="answer_memory", param=self._param, headers=retry_after(1.0))
        self._taken = self._count

    def close(self) -> None:
        """Free the room of this answer in the budget."""
        self._budget.give_back(self)
        self._count = self._taken = 0


class ChoiceFormatter(Protocol):
    """Makes the choices of an answer, in the form of a completion or of a chat."""

    @property
    def object(self) -> str: ...

    @property
    def chunk_object(self) -> str: ...

    @property
    def token_ids(self) -> TokenIds: ...

    def choice(self, index: int, choice: Choice) -> dict[str, Any]: ...

    def prompt_copies(self, choices: int) -> int:
        """Return how many times a whole answer with so many choices of one prompt has its log-probabilities."""

    def beside(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the fields that stand beside the choices of a whole answer."""

    def of_prompt(self) -> dict[str, Any]:
        """Return the fields about the prompt that stand beside the choices, in a stream beside the first ones."""

    def first_chunks(self, index: int) -> list[dict[str, Any]]:
        """Return the chunks that a stream sends before a choice's first delta."""

    def chunks(self, index: int, choice: Choice, delta: Delta) -> Iterable[dict[str, Any]]:
        """Return the chunks for ``delta``, which ``choice`` already contains."""


@dataclass(frozen=True)
class Envelope:
    """The fields that all objects of one answer have in common."""

    id: str
    model: str
    formatter: ChoiceFormatter
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, choices: Sequence[dict[str, Any]], beside: dict[str, Any], used: dict[str, Any]) -> dict[str, Any]:
        """Return a whole answer. ``used`` is its end, where a gateway finds it without reading the rest."""
        return self._object(self.formatter.object, choices) | beside | {"usage": used}

    def chunk(self, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return self._object(self.formatter.chunk_object, choices)

    def _object(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
        }


def usage(choices: Sequence[Choice], per_prompt: int) -> dict[str, Any]:
    """Count an answer's tokens. A prompt counts once, however many sequences (``per_prompt``) continue it."""
    of_prompts = [choices[first : first + per_prompt] for first in range(0, len(choices), per_prompt)]
    prompt = sum(max(choice.prompt_tokens for choice in group) for group in of_prompts)
    # A prompt that several sequences continue is computed once.
    cached = sum(min(choice.cached_tokens for choice in group) for group in of_prompts)
    completion = sum(choice.completion_tokens for choice in choices)
    used = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    if all(choice.parser is None for choice in choices):
        return used
    return used | {"completion_tokens_details": {"reasoning_tokens": sum(each.reasoning_tokens for each in choices)}}
