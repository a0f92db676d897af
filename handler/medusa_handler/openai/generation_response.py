"""The response to a request that generates text: whole, or as a stream."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from flask import Response
from medusa_runtime.engine.base import Delta, GenerateRequest
from medusa_runtime.errors import RequestError

from ..faults import ApiError, ClientDisconnectedError, compact, stream_error
from ..http import sse
from ..logprob_budget import LogprobBudget
from ..merge import Item
from ..model.generation import Generation
from .answer import Choice, Envelope, LogprobLimit, usage
from .reasoning import Reasoning

if TYPE_CHECKING:
    from ..service import Service

logger = logging.getLogger(__name__)

_TOO_MANY = (
    "in an answer that is not a stream, where each choice has those of an echoed prompt, found more; expected "
    "stream: true, or fewer sequences, tokens or alternatives"
)


class Answer(Protocol):
    """An answer that grows with the deltas of its sequences. It is read whole, or as the events of a stream."""

    @property
    def id(self) -> str: ...

    @property
    def ping(self) -> bytes:
        """An event that a silent stream sends beside its comments, if the interface has one."""

    def add(self, number: int, delta: Delta) -> None:
        """Add a delta of the sequence with this number."""

    def whole(self) -> dict[str, Any]:
        """Return the whole answer, once all deltas have been added."""

    def opening(self, first: Delta | None) -> Iterator[bytes]:
        """Yield the events before the first delta, which is given if it has come already."""

    def stream(self, number: int, delta: Delta) -> Iterator[bytes]:
        """Add a delta of a sequence, and yield the events for it."""

    def closing(self) -> Iterator[bytes]:
        """Yield the events behind the last delta."""

    def failure(self, error: ApiError) -> Iterator[bytes]:
        """Yield the events that end a stream with an error."""

    def close(self) -> None:
        """Give back what the answer has taken of its budget."""


class Plan(Protocol):
    """The requests to the engine that an HTTP request needs, and the form of its answer."""

    @property
    def requests(self) -> list[GenerateRequest]: ...

    @property
    def streams(self) -> bool: ...

    @property
    def names(self) -> Mapping[str, str]:
        """The engine's names of fields → the body's."""

    def answer(self, budget: LogprobBudget) -> Answer: ...


@dataclass(frozen=True)
class GenerationPlan:
    """What to generate: ``per_prompt`` sequences for each prompt, of which the best ``keep`` are returned.

    ``reasoning`` is how they begin, if it is to be told from their text.
    """

    requests: list[GenerateRequest]
    envelope: Envelope
    per_prompt: int
    keep: int
    streams: bool
    include_usage: bool
    usage_in_chunks: bool = False
    names: Mapping[str, str] = field(default_factory=dict)
    reasoning: Reasoning | None = None

    def answer(self, budget: LogprobBudget) -> Answer:
        return _Choices(self, budget)


class _Choices:
    """The choices of a completion or a chat."""

    ping = b""

    def __init__(self, plan: GenerationPlan, budget: LogprobBudget) -> None:
        self._plan = plan
        self._envelope = plan.envelope
        self._formatter = plan.envelope.formatter
        reasoning = plan.reasoning
        kept = self._formatter.token_ids.returned
        self._choices = [
            Choice(None if reasoning is None else reasoning.parser(), token_ids=[] if kept else None)
            for _ in plan.requests
        ]
        self._logprobs = LogprobLimit("logprobs", _TOO_MANY, budget)

    @property
    def id(self) -> str:
        return self._envelope.id

    def add(self, number: int, delta: Delta) -> None:
        """Add a delta. Raises ApiError 400 for more log-probabilities than an answer may keep."""
        self._choices[number].add(delta)
        self._logprobs.add(delta, self._formatter.prompt_copies(self._plan.keep))

    def whole(self) -> dict[str, Any]:
        plan, kept = self._plan, []
        for first in range(0, len(self._choices), plan.per_prompt):
            group = self._choices[first : first + plan.per_prompt]
            for choice in group[1:]:
                choice.prompt_logprobs = group[0].prompt_logprobs  # only the first is asked for them
            if plan.keep < plan.per_prompt:
                group = sorted(group, key=lambda choice: choice.mean_logprob, reverse=True)[: plan.keep]
            kept.extend(group)
        objects = [self._formatter.choice(index, choice) for index, choice in enumerate(kept)]
        return self._envelope.whole(objects, self._formatter.beside(kept), usage(self._choices, plan.per_prompt))

    def opening(self, first: Delta | None) -> Iterator[bytes]:
        for index, choice in enumerate(self._choices):
            for opening in self._formatter.first_chunks(index):
                if first is not None and self._plan.per_prompt == len(self._choices):
                    choice.prompt_tokens = first.prompt_tokens
                yield self._chunk(opening, self._formatter.of_prompt())

    def stream(self, number: int, delta: Delta) -> Iterator[bytes]:
        choice = self._choices[number]
        choice.add(delta)
        yield from map(self._chunk, self._formatter.chunks(number, choice, delta))
        choice.forget()

    def closing(self) -> Iterator[bytes]:
        if self._plan.include_usage:
            yield sse.event(self._envelope.chunk([]) | {"usage": usage(self._choices, self._plan.per_prompt)})
        yield sse.DONE

    def failure(self, error: ApiError) -> Iterator[bytes]:
        yield sse.event(error.body())
        yield sse.DONE

    def close(self) -> None:
        self._logprobs.close()

    def _chunk(self, choice: dict[str, Any], beside: dict[str, Any] | None = None) -> bytes:
        plan, used = self._plan, {}
        if plan.include_usage:
            of_choice = self._choices[choice["index"] : choice["index"] + 1]  # as in vLLM, of this choice alone
            used = {"usage": usage(of_choice, 1) if plan.usage_in_chunks else None}
        return sse.event(self._envelope.chunk([choice]) | (beside or {}) | used)


def respond(service: Service, plan: Plan, is_disconnected: Callable[[], bool]) -> Response:
    """Run the plan. An error before the first token has its own status; a later one is an event of the stream."""
    generation = Generation(service.model, plan.requests, is_disconnected)
    try:
        if not plan.streams:
            with generation:
                return _whole(plan.answer(service.logprobs), generation)
        events = generation.events(service.settings.heartbeat_s)
        first = next(events)  # an error before the first token still has its own status
        while first is None and not service.platform.early_heartbeats:
            first = next(events)
    except BaseException as error:
        generation.close()
        _name_field(plan, error)
        raise
    response = Response(_stream(service, plan, first, events), content_type=sse.CONTENT_TYPE)
    response.call_on_close(generation.close)
    return response


def _name_field(plan: Plan, error: BaseException) -> None:
    """Have an engine's error name the body's field, also where its message begins with it."""
    if not isinstance(error, RequestError) or error.param is None:
        return
    name, text = plan.names.get(error.param, error.param), str(error)
    if text.startswith(f"{error.param}: "):
        error.args = (name + text.removeprefix(error.param),)
    error.param = name


def _whole(answer: Answer, generation: Generation) -> Response:
    try:
        for item in generation.events():
            if item is not None:
                answer.add(item.source, item.value)
        return Response(compact(answer.whole()), content_type="application/json")
    finally:
        answer.close()


def _stream(
    service: Service, plan: Plan, first: Item[Delta] | None, events: Iterator[Item[Delta] | None]
) -> Iterator[bytes]:
    answer = plan.answer(service.logprobs)
    try:
        yield from answer.opening(None if first is None else first.value)
        item = first
        while True:
            if item is None:
                yield sse.heartbeat(service) + answer.ping
            else:
                yield from answer.stream(item.source, item.value)
            try:
                item = next(events)
            except StopIteration:
                break
        yield from answer.closing()
    except ClientDisconnectedError:
        return
    except Exception as error:  # noqa: BLE001 the status has been sent, so only the stream can report it
        _name_field(plan, error)
        known = stream_error(error, answer.id, lambda: logger.exception("request %s failed", answer.id))
        yield from answer.failure(known)
    finally:
        answer.close()
