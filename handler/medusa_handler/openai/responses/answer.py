"""The response object, whole or as the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from medusa_runtime.engine.base import Delta, GenerateRequest

from ...faults import ApiError
from ...http import sse
from ...logprob_budget import LogprobBudget
from ..answer import Choice, LogprobLimit
from ..generation_response import Answer
from ..output import Event, Output
from ..reasoning import Reasoning

# The codes that a response's error may have.
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
_FAILED = "server_error"
_TOO_MANY = "in a response, whose last events repeat them, found more; expected fewer of them, or fewer tokens"


@dataclass(frozen=True)
class ResponsePlan:
    """The engine's request for a response. ``head`` has the response object's fields that repeat the HTTP request."""

    request: GenerateRequest
    head: Mapping[str, Any]
    output: Output
    streams: bool
    names: Mapping[str, str] = field(default_factory=dict)
    reasoning: Reasoning | None = None

    @property
    def requests(self) -> list[GenerateRequest]:
        return [self.request]

    def answer(self, budget: LogprobBudget) -> Answer:
        return _ResponseAnswer(self, budget)


class _ResponseAnswer:
    ping = b""

    def __init__(self, plan: ResponsePlan, budget: LogprobBudget) -> None:
        self._head = plan.head
        self._output = plan.output
        self._choice = Choice(None if plan.reasoning is None else plan.reasoning.parser())
        self._logprobs = LogprobLimit("top_logprobs", _TOO_MANY, budget)
        self._created = int(time.time())
        self._events = 0

    @property
    def id(self) -> str:
        return str(self._head["id"])

    def add(self, number: int, delta: Delta) -> None:
        for _ in self._add(delta):
            pass

    def whole(self) -> dict[str, Any]:
        for _ in self._output.finish(self._status):
            pass
        return self._object(self._status)

    def opening(self, first: Delta | None) -> Iterator[bytes]:
        yield self._event({"type": "response.created", "response": self._object("in_progress")})
        yield self._event({"type": "response.in_progress", "response": self._object("in_progress")})

    def stream(self, number: int, delta: Delta) -> Iterator[bytes]:
        yield from map(self._event, self._add(delta))

    def closing(self) -> Iterator[bytes]:
        yield from map(self._event, self._output.finish(self._status))
        yield self._event({"type": f"response.{self._status}", "response": self._object(self._status)})

    def failure(self, error: ApiError) -> Iterator[bytes]:
        """Yield a failed response. Its code is one of OpenAI's few, and its type our own code."""
        known = error.body()["error"]
        found = {
            "code": _CODES.get(error.status, _FAILED),
            "message": known["message"],
            "type": known["code"] or known["type"],
            "param": known["param"],
        }
        yield self._event({"type": "response.failed", "response": self._object("failed", found)})

    def close(self) -> None:
        self._logprobs.close()

    def _add(self, delta: Delta) -> Iterator[Event]:
        self._choice.add(delta)
        self._logprobs.add(delta)
        yield from self._output.add(self._choice)
        self._choice.forget()  # the output keeps them

    @property
    def _status(self) -> str:
        return "completed" if self._choice.finish_reason == "stop" else "incomplete"

    def _event(self, event: Event) -> bytes:
        """Return an event with its number."""
        numbered = {"type": event["type"], "sequence_number": self._events, **event}
        self._events += 1
        return sse.named_event(numbered)

    def _object(self, status: str, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        is_cut = self._choice.finish_reason == "length"
        return {
            **self._head,
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" and is_cut else None,
            "output": list(self._output.items),
            "usage": None if status == "in_progress" else self._usage(),
        }

    def _usage(self) -> dict[str, Any]:
        used, written = self._choice.prompt_tokens, self._choice.completion_tokens
        return {
            "input_tokens": used,
            "input_tokens_details": {"cached_tokens": self._choice.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": self._choice.reasoning_tokens},
            "total_tokens": used + written,
        }
