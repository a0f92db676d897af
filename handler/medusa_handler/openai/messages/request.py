"""The body of /v1/messages: its fields in Anthropic's form, checked and read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...faults import invalid
from ...model.harmony import TEMPLATE_MARKER
from ...model.structured_outputs import json_schema
from ..body import fields, parameters
from ..body.output_constraint import OutputConstraint
from ..body.parameters import Body
from ..chat import template_arguments
from ..tools.choice import Tools, blocks_tools_of
from .turns import Message, chat_messages

if TYPE_CHECKING:
    from ...model.chat_template import ChatTemplate

_THINKING = ("enabled", "disabled", "adaptive")
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_OF_THINKING = frozenset(("type", "budget_tokens", "display"))
_OF_OUTPUT = frozenset(("effort", "format", "task_budget"))


@dataclass(frozen=True)
class MessagesRequest:
    """A checked request. ``sampling`` has its sampling fields, with the names of chats; ``thinks`` is None for auto."""

    messages: list[Message]
    tools: Tools
    constraint: OutputConstraint | None
    max_tokens: int | None
    sampling: Body
    streams: bool
    thinks: bool | None
    effort: str | None
    extra: Mapping[str, Any]

    @classmethod
    def parse(cls, body: Body, *, counts: bool = False) -> MessagesRequest:
        """Read a body of known fields, of /count_tokens with ``counts``. Raises ApiError 400, which names the field."""
        max_tokens = parameters.integer(body, "max_tokens", None, 1)
        if max_tokens is None and not counts:
            raise invalid("max_tokens", "a whole number of at least 1", None)
        parameters.number(body, "temperature", 1.0, 0.0, 1.0)  # with Anthropic, it goes up to 1 only
        stops = parameters.stop_strings(body, "stop_sequences")
        output = fields.inner_object(body, "output_config", _OF_OUTPUT) or {}
        effort = output.get("effort")
        if effort is not None and effort not in _EFFORTS:
            raise invalid("output_config.effort", f"one of {', '.join(_EFFORTS)}", effort)
        return cls(
            chat_messages(body.get("system"), body.get("messages")),
            blocks_tools_of(body),
            _constraint(output.get("format")),
            max_tokens,
            {**body, "stop": list(stops)},
            parameters.flag(body, "stream"),
            _thinks(body),
            effort,
            template_arguments({"chat_template_kwargs": body.get("chat_template_kwargs")}),
        )

    @property
    def continues(self) -> bool:
        """True if the answer continues the last message: one of the assistant that has text."""
        return self.messages[-1]["role"] == "assistant" and bool(self.messages[-1]["content"].strip())

    def effort_for(self, template: ChatTemplate) -> str | None:
        """Return the effort in the template's own words: gpt-oss has three degrees, and cannot answer without any."""
        if TEMPLATE_MARKER not in template.source:
            return self.effort
        if self.thinks is False:
            return "low"
        return "high" if self.effort in ("xhigh", "max") else self.effort

    def template_arguments(self, template: ChatTemplate) -> dict[str, Any]:
        """Return the arguments of the chat template besides the messages."""
        effort = self.effort_for(template)
        return {
            # Templates differ in the name of the switch.
            **({} if self.thinks is None else {"enable_thinking": self.thinks, "thinking": self.thinks}),
            **({} if effort is None else {"reasoning_effort": effort}),
            **self.extra,
            "tools": None if self.tools.choice == "none" else self.tools.offered or None,
            "add_generation_prompt": not self.continues,
            "continue_final_message": self.continues,
        }


def _thinks(body: Body) -> bool | None:
    value = fields.inner_object(body, "thinking", _OF_THINKING)
    if value is None:
        return None
    kind = value.get("type")
    if kind not in _THINKING:
        raise invalid("thinking.type", f"one of {', '.join(_THINKING)}", kind)
    # Both change no answer: the reasoning has no limit of its own, and is shown as it is.
    parameters.integer({"thinking.budget_tokens": value.get("budget_tokens")}, "thinking.budget_tokens", None, 1)
    display = value.get("display")
    if display is not None and not isinstance(display, str):
        raise invalid("thinking.display", "text", display)
    return {"enabled": True, "disabled": False}.get(kind)


def _constraint(value: Any) -> OutputConstraint | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or value.get("type") != "json_schema":
        raise invalid("output_config.format", '{"type": "json_schema", "schema": …}', value)
    fields.check_inner_fields(value, "output_config.format", frozenset(("type", "schema")))
    return OutputConstraint(json_schema(value.get("schema"), "output_config.format.schema"), "output_config.format")
