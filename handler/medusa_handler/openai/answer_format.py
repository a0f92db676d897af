"""How an answer is read and constrained: its calls of tools, its reasoning, and the form that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from medusa_runtime.engine.base import SamplingParams

from ..faults import ApiError, UnsupportedRequestError, invalid
from ..model.harmony import EFFORTS, HarmonyReasoning
from .body.output_constraint import OutputConstraint
from .body.parameters import Body
from .reasoning import Reasoning, TaggedReasoning, reasoning_of

if TYPE_CHECKING:
    from ..model.chat_template import ChatTemplate
    from ..service import Service
    from .tools.choice import Tools
    from .tools.formats import Format, ToolParser


class Asked(NamedTuple):
    """The format that a request wants its answer in. ``effort`` is in the body's field of that name."""

    body: Body
    tools: Tools
    constraint: OutputConstraint | None
    effort: Any
    effort_field: str = "reasoning_effort"


class AnswerFormat(NamedTuple):
    """How an answer is read, and the constraint on it. ``parser`` makes the parser of its calls."""

    parser: Callable[[], ToolParser] | None
    reasoning: Reasoning | None
    constraint: OutputConstraint | None


def answer_format(
    service: Service,
    template: ChatTemplate,
    prompt: str,
    asked: Asked,
    is_disconnected: Callable[[], bool],
    continued: str | None = None,
) -> AnswerFormat:
    """Return how the answer to a prompt is read. Raises ApiError 400 for what its format does not have."""
    from .tools.formats import HARMONY, format_of

    settings = service.settings
    reasoning = reasoning_of(settings.reasoning_parser, template.source, prompt, continued)
    found = format_of(settings.tool_call_parser, template.source)
    if isinstance(reasoning, HarmonyReasoning):
        found = HARMONY
        if asked.effort is not None and asked.effort not in EFFORTS:
            raise invalid(asked.effort_field, "low, medium or high, which this model knows", asked.effort)
    constraint = _forced_constraint(asked.body, asked.tools, asked.constraint, found)
    if isinstance(reasoning, TaggedReasoning):
        reasoning = _tagged(service, reasoning, constraint, is_disconnected)
    return AnswerFormat(asked.tools.parser(found), reasoning, constraint)


def _forced_constraint(
    body: Body, tools: Tools, requested: OutputConstraint | None, found: Format | None
) -> OutputConstraint | None:
    """Return the constraint on a chat's answer, if the tools or the body ask for one. Raises ApiError 400."""
    forced = tools.output_constraint(found)
    if forced is None:
        return requested
    if requested is not None:
        expected = "nothing where tool_choice forces a call"
        raise invalid(requested.field, expected, body[requested.field.partition(".")[0]])
    return OutputConstraint(forced, "tools")


def _tagged(
    service: Service,
    reasoning: TaggedReasoning,
    constraint: OutputConstraint | None,
    is_disconnected: Callable[[], bool],
) -> TaggedReasoning | None:
    """Return how an answer with tags begins, if its reasoning is to be told from the rest."""
    if service.can_relay:  # the engine's own server has a parser for it
        return None
    if constraint is None:
        return reasoning
    if service.model.wait_info(is_disconnected).engine == "torch":
        return reasoning._replace(ends_at_call=False)  # the form begins behind the closing tag
    return reasoning._replace(place="behind")  # the forms of vLLM's workers in a cluster begin at once


def with_form(
    params: SamplingParams, constraint: OutputConstraint | None, reasoning: Reasoning | None, *, parsed: bool
) -> SamplingParams:
    """Return the parameters for an answer of this form; with ``parsed``, calls are looked for in its text."""
    form = None if constraint is None else constraint.outputs
    if form is not None and reasoning is not None:
        form = reasoning.before(form)
    # What marks a call or the reasoning may be a special token.
    marked = (parsed and (form is None or form.header)) or (reasoning is not None and reasoning.is_marked)
    return replace(params, structured_outputs=form, skip_special_tokens=params.skip_special_tokens and not marked)


def check_none_hidden(service: Service, tools: Tools) -> None:
    """Raise UnsupportedRequestError for tools that our prompt does not show, unlike that of the engine's own server."""
    if service.can_relay and tools.choice == "none" and tools.offered:
        raise UnsupportedRequestError(400, "tools: vLLM shows the model also those that it may not call", param="tools")


def check_shown(template: ChatTemplate, given: Mapping[str, Any]) -> None:
    """Raise ApiError 400 for a field with a value that the template does not show to the model."""
    for field, value in given.items():
        if value and not template.takes(field):
            raise ApiError(
                400, f"{field}: the model's chat template has no place for them, so the model would not see them; "
                "expected none, or a chat_template.jinja that shows them beside the weights", param=field,
                code="unsupported_value",
            )  # fmt: skip


def field_names(constraint: OutputConstraint | None) -> dict[str, str]:
    return {} if constraint is None else {"structured_outputs": constraint.field}
