"""The body of /v1/responses: its fields in OpenAI's form, checked and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...faults import invalid
from ..body import fields, parameters
from ..body.output_constraint import OutputConstraint, text_constraint
from ..body.parameters import Body
from ..chat import template_arguments
from ..tools.choice import Tools, flat_tools_of
from .items import messages

_LOGPROBS = "message.output_text.logprobs"
# What else OpenAI includes on request is part of no answer here.
_OF_OTHER_ITEMS = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
)
_STREAM_OPTIONS = frozenset(("include_obfuscation",))
_MOST_METADATA, _LONGEST_KEY, _LONGEST_VALUE = 16, 64, 512


@dataclass(frozen=True)
class ResponsesRequest:
    """A checked request. ``alternatives`` is how many log-probabilities come with each token; None for none."""

    messages: list[dict[str, Any]]
    template_arguments: dict[str, Any]
    tools: Tools
    constraint: OutputConstraint | None
    max_tokens: int | None
    alternatives: int | None
    truncates: bool
    streams: bool
    shows_reasoning: bool
    shown: dict[str, Any]  # the fields of the response object that repeat the request

    @classmethod
    def parse(cls, body: Body) -> ResponsesRequest:
        """Read a body of known fields. Raises ApiError 400, which names the field at fault."""
        instructions = _text(body, "instructions")
        effort = _effort(body)
        tools = flat_tools_of(body)
        arguments = template_arguments(
            {"chat_template_kwargs": body.get("chat_template_kwargs"), "reasoning_effort": effort}
        )
        truncation = body.get("truncation")
        if truncation not in (None, "auto", "disabled"):
            raise invalid("truncation", "auto or disabled", truncation)
        _check_stream_options(body)
        parameters.count(body, "max_tool_calls", 1, 1)  # of OpenAI's own tools, of which there are none
        parameters.flag(body, "store")
        max_tokens = parameters.integer(body, "max_output_tokens", None, 1)
        alternatives = _alternatives(body)
        return cls(
            messages(body.get("input"), instructions),
            arguments | {"tools": None if tools.choice == "none" else tools.offered or None},
            tools,
            text_constraint(body),
            max_tokens,
            alternatives,
            truncation == "auto",
            parameters.flag(body, "stream"),
            parameters.flag(body, "include_reasoning", True),
            {
                "background": False,
                "conversation": None,
                "instructions": instructions,
                "max_output_tokens": max_tokens,
                "max_tool_calls": body.get("max_tool_calls"),
                "metadata": _metadata(body),
                "parallel_tool_calls": tools.parallel,
                "previous_response_id": None,
                "prompt": None,
                "prompt_cache_key": _text(body, "prompt_cache_key"),
                "reasoning": {"effort": effort, "summary": None},
                "safety_identifier": _text(body, "safety_identifier"),
                "service_tier": "default",
                "store": False,
                "text": {"format": {"type": "text"}, **_given(body.get("text"))},
                "tool_choice": "auto" if body.get("tool_choice") is None else body["tool_choice"],
                "tools": body.get("tools") or [],
                "top_logprobs": alternatives or 0,
                "truncation": truncation or "disabled",
                "user": _text(body, "user"),
            },
        )


def _given(value: Any) -> dict[str, Any]:
    return {name: each for name, each in (value or {}).items() if each is not None}


def _text(body: Body, name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise invalid(name, "text", value)
    return value


def _effort(body: Body) -> str | None:
    """Return ``reasoning.effort``. Raises ApiError 400 for what else is asked of the reasoning."""
    value = fields.inner_object(body, "reasoning", fields.REASONING, fields.REFUSED_REASONING)
    effort = None if value is None else value.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise invalid("reasoning.effort", "text", effort)
    return effort


def _alternatives(body: Body) -> int | None:
    include = body.get("include")
    if include is not None and not isinstance(include, list):
        raise invalid("include", "a list", include)
    for number, each in enumerate(include or []):
        if each != _LOGPROBS and each not in _OF_OTHER_ITEMS:
            raise invalid(f"include[{number}]", f"{_LOGPROBS}, or another value that OpenAI knows", each)
    alternatives = parameters.logprob_count(body, "top_logprobs")
    if _LOGPROBS in (include or []):
        return alternatives or 0
    if alternatives:
        raise invalid("top_logprobs", f'include to have "{_LOGPROBS}" with it', alternatives)
    return None


def _check_stream_options(body: Body) -> None:
    options = fields.inner_object(body, "stream_options", _STREAM_OPTIONS)
    if options is not None:
        parameters.flag(options, "include_obfuscation")  # it asks for random characters, which are never sent


def _metadata(body: Body) -> dict[str, str]:
    value = body.get("metadata")
    if value is None:
        return {}
    good = isinstance(value, Mapping) and all(
        len(key) <= _LONGEST_KEY and isinstance(each, str) and len(each) <= _LONGEST_VALUE
        for key, each in value.items()
    )
    if not good or len(value) > _MOST_METADATA:
        expected = (
            f"an object of at most {_MOST_METADATA} texts, each of at most {_LONGEST_VALUE} characters, "
            f"with keys of at most {_LONGEST_KEY}"
        )
        raise invalid("metadata", expected, value)
    return dict(value)
