"""The message object, whole or as the events of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from medusa_runtime.engine.base import Delta, GenerateRequest

from ...faults import ApiError
from ...http import sse
from ...logprob_budget import LogprobBudget
from ..answer import Choice
from ..generation_response import Answer
from ..output import Output
from ..reasoning import Reasoning
from .blocks import Blocks


@dataclass(frozen=True)
class MessagePlan:
    """The engine's request for a message. ``blocks`` makes those of the ``output``."""

    request: GenerateRequest
    id: str
    model: str
    blocks: Blocks
    output: Output
    streams: bool
    names: Mapping[str, str] = field(default_factory=dict)
    reasoning: Reasoning | None = None

    @property
    def requests(self) -> list[GenerateRequest]:
        return [self.request]

    def answer(self, budget: LogprobBudget) -> Answer:
        return _MessageAnswer(self)


class _MessageAnswer:
    ping = sse.named_event({"type": "ping"})

    def __init__(self, plan: MessagePlan) -> None:
        self._plan = plan
        self._output = plan.output
        self._choice = Choice(None if plan.reasoning is None else plan.reasoning.parser())

    @property
    def id(self) -> str:
        return self._plan.id

    def add(self, number: int, delta: Delta) -> None:
        for _ in self.stream(number, delta):
            pass

    def whole(self) -> dict[str, Any]:
        for _ in self._output.finish("incomplete"):
            pass
        return self._message(self._output.items, *self._stopped(), self._usage())

    def opening(self, first: Delta | None) -> Iterator[bytes]:
        used = _used(0, 0, 0) if first is None else _used(first.prompt_tokens, first.cached_tokens, 0)
        yield sse.named_event({"type": "message_start", "message": self._message([], None, None, used)})
        yield self.ping

    def stream(self, number: int, delta: Delta) -> Iterator[bytes]:
        self._choice.add(delta)
        yield from map(sse.named_event, self._output.add(self._choice))
        self._choice.forget()  # the output keeps it

    def closing(self) -> Iterator[bytes]:
        yield from map(sse.named_event, self._output.finish("incomplete"))
        reason, sequence = self._stopped()
        stopped = {"stop_reason": reason, "stop_sequence": sequence}
        yield sse.named_event({"type": "message_delta", "delta": stopped, "usage": self._usage()})
        yield sse.named_event({"type": "message_stop"})

    def failure(self, error: ApiError) -> Iterator[bytes]:
        yield sse.named_event(error.message_body())

    def close(self) -> None:
        pass

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, sequence: str | None, used: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._plan.id,
            "type": "message",
            "role": "assistant",
            "model": self._plan.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": used,
        }

    def _stopped(self) -> tuple[str, str | None]:
        """Return the stop reason, and the sequence that stopped the answer.

        A whole call is to be run, even if a stop sequence came behind it. One that the sequence cut off is not.
        """
        choice, call = self._choice, self._plan.blocks.last_call
        if choice.finish_reason == "length":
            return "max_tokens", None
        if isinstance(choice.stop_reason, str) and (call is None or not call.is_whole):
            return "stop_sequence", choice.stop_reason
        return "end_turn" if call is None else "tool_use", None

    def _usage(self) -> dict[str, Any]:
        choice = self._choice
        used = _used(choice.prompt_tokens, choice.cached_tokens, choice.completion_tokens)
        if choice.parser is not None:
            used |= {"output_tokens_details": {"thinking_tokens": choice.reasoning_tokens}}
        return used


def _used(prompt: int, cached: int, completion: int) -> dict[str, Any]:
    """Return a usage. In this API, the input tokens are those that were not in the cache."""
    return {
        "input_tokens": prompt - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": completion,
    }
