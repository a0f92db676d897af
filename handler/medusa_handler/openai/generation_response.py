"""The response to a request that generates text: whole, or as a stream."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flask import Response
from medusa_runtime.engine.base import Delta, GenerateRequest
from medusa_runtime.errors import RequestError

from ..faults import ClientDisconnectedError, compact, stream_error
from ..http import sse
from ..merge import Item
from ..model.generation import Generation
from .answer import Choice, ChoiceFormatter, Envelope, usage

if TYPE_CHECKING:
    from ..service import Service

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GenerationPlan:
    """What to generate: ``per_prompt`` sequences for each prompt, of which the best ``keep`` are returned."""

    requests: list[GenerateRequest]
    envelope: Envelope
    per_prompt: int
    keep: int
    stream: bool
    include_usage: bool
    usage_in_chunks: bool = False
    names: Mapping[str, str] = field(default_factory=dict)  # the engine's names of fields → the body's

    def name_field(self, error: BaseException) -> None:
        if isinstance(error, RequestError) and error.param is not None:
            error.param = self.names.get(error.param, error.param)


def respond(service: Service, plan: GenerationPlan, is_disconnected: Callable[[], bool]) -> Response:
    """Run the plan. An error before the first token has its own status; a later one is an event of the stream."""
    generation = Generation(service.model, plan.requests, is_disconnected)
    try:
        if not plan.stream:
            with generation:
                return _whole(plan, generation)
        events = generation.events(service.settings.heartbeat_s)
        first = next(events)  # an error before the first token still has its own status
        while first is None and not service.platform.early_heartbeats:
            first = next(events)
    except BaseException as error:
        generation.close()
        plan.name_field(error)
        raise
    response = Response(_chunks(service, plan, first, events), content_type=sse.CONTENT_TYPE, headers=sse.HEADERS)
    response.call_on_close(generation.close)
    return response


def _whole(plan: GenerationPlan, generation: Generation) -> Response:
    choices = [Choice() for _ in plan.requests]
    for item in generation.events():
        if item is not None:
            choices[item.source].add(item.value)
    used = usage(choices, plan.per_prompt)
    kept = []
    for first in range(0, len(choices), plan.per_prompt):
        group = choices[first : first + plan.per_prompt]
        if plan.keep < plan.per_prompt:
            group = sorted(group, key=lambda choice: choice.mean_logprob, reverse=True)[: plan.keep]
        kept.extend(group)
    formatter = plan.envelope.formatter
    objects = [formatter.choice(index, choice) for index, choice in enumerate(kept)]
    return Response(compact(plan.envelope.whole(objects, used)), content_type="application/json")


def _chunks(
    service: Service, plan: GenerationPlan, first: Item[Delta] | None, events: Iterator[Item[Delta] | None]
) -> Iterator[bytes]:
    try:
        yield from _events(service, plan, first, events)
    except ClientDisconnectedError:
        return
    except Exception as error:  # noqa: BLE001 the status has been sent, so only the stream can report it
        plan.name_field(error)
        name = plan.envelope.id
        known = stream_error(error, name, lambda: logger.exception("request %s failed", name))
        yield sse.event(known.body())
    yield sse.DONE


def _events(
    service: Service, plan: GenerationPlan, first: Item[Delta] | None, events: Iterator[Item[Delta] | None]
) -> Iterator[bytes]:
    choices = [Choice() for _ in plan.requests]
    formatter: ChoiceFormatter = plan.envelope.formatter

    def used() -> dict[str, Any]:
        if plan.include_usage and plan.usage_in_chunks:
            return {"usage": usage(choices, plan.per_prompt)}
        return {"usage": None} if plan.include_usage else {}

    for index in range(len(choices)):
        for opening in formatter.first_chunks(index):
            yield sse.event(plan.envelope.chunk([opening]) | used())
    item = first
    while True:
        if item is None:
            yield sse.heartbeat(service)
        else:
            choices[item.source].add(item.value)
            chunk = formatter.chunk(item.source, choices[item.source], item.value)
            yield sse.event(plan.envelope.chunk([chunk]) | used())
        try:
            item = next(events)
        except StopIteration:
            break
    if plan.include_usage:
        yield sse.event(plan.envelope.chunk([]) | {"usage": usage(choices, plan.per_prompt)})
