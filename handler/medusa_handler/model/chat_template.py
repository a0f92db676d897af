"""The checkpoint's own chat template, which turns messages into a prompt.

A template may use the same as in Hugging Face transformers: raise_exception, strftime_now, tojson, loop controls, the
``generation`` tag. transformers itself is not imported, because that takes over two seconds.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from medusa_runtime.bounded_json import count_values, parse_json
from medusa_runtime.errors import json_kind

from ..faults import ApiError

if TYPE_CHECKING:
    from jinja2 import Environment, Template

_MOST_VALUES = 200_000  # in the arguments of all calls together; others stay text
ReadFile = Callable[[str], bytes | None]

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatTemplate:
    """The templates of one checkpoint by name, and its special tokens. ``read`` returns a file's bytes or None."""

    def __init__(self, read: ReadFile) -> None:
        config = _json(read, "tokenizer_config.json")
        tokens = {**_json(read, "special_tokens_map.json"), **config}
        self._special = {name: _content(tokens[name]) for name in _SPECIAL if tokens.get(name) is not None}
        self._sources = _sources(read, config)
        self._compiled: dict[str, Template] = {}

    @property
    def source(self) -> str:
        """The text of all templates."""
        return "\n".join(self._sources.values())

    def takes(self, name: str) -> bool:
        """Return whether a template mentions the variable ``name``. If none does, it would not reach the model."""
        return re.search(rf"\b{name}\b", self.source) is not None

    def render(self, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> str:
        """Return the prompt. Raises ApiError 400 if there is no template or it refuses the messages."""
        name = "tool_use" if arguments.get("tools") and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise ApiError(
                400,
                "this model has no chat template (chat_template.jinja, chat_template.json or tokenizer_config.json); "
                "use /v1/completions, or put a chat_template.jinja beside its weights",
                code="no_chat_template",
            )
        from .harmony import TEMPLATE_MARKER, turns  # a millisecond, and only a chat needs it

        messages = _with_parsed_calls(self._with_known_roles(messages))
        if TEMPLATE_MARKER in self.source:
            messages = list(turns(messages))
        values = {**self._special, **arguments, "messages": messages}
        continuing = values.pop("continue_final_message", False)
        try:
            text = self._template(name).render(values)
        except Exception as error:
            raise ApiError(400, _reason(name, error), param="messages", code="bad_messages") from error
        return _cut_behind(text, messages[-1]["content"]) if continuing else text

    def _with_known_roles(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages with the role system for developer, which many templates would leave out, as vLLM does.

        OpenAI's newer clients write it so.
        """
        if not any(message.get("role") == "developer" for message in messages):
            return messages
        if re.search("[\"']developer[\"']", self.source):
            return messages
        return [
            {**message, "role": "system"} if message.get("role") == "developer" else message for message in messages
        ]

    def _template(self, name: str) -> Template:
        if name not in self._compiled:
            self._compiled[name] = _environment().from_string(self._sources[name])
        return self._compiled[name]


def _sources(read: ReadFile, config: Mapping[str, Any]) -> dict[str, str]:
    if (text := read("chat_template.jinja")) is not None:
        try:
            return {"default": text.decode()}
        except UnicodeDecodeError as error:
            raise _bad("chat_template.jinja is not UTF-8", str(error)) from None
    found = _json(read, "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, Mapping):
        return {str(name): str(text) for name, text in found.items()}
    if isinstance(found, list):
        try:
            return {str(entry["name"]): str(entry["template"]) for entry in found}
        except (KeyError, TypeError) as error:
            raise _bad("chat_template is no list of objects with name and template", str(error)) from None
    return {}


def _reason(name: str, error: Exception) -> str:
    from medusa_runtime.bounded_template.budget import TemplateLimitError

    if isinstance(error, TemplateLimitError):
        return (
            f"the model's chat template {name!r} {error.what}; send less, or put a chat_template.jinja that stays "
            "within the limits beside the weights"
        )
    return f"the model's chat template refuses these messages: {error}"


def _environment() -> Environment:
    from jinja2 import nodes  # 50 ms, and only a chat needs it
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from medusa_runtime.bounded_template.gate import template_environment

    class Generation(Extension):
        """The tag that marks the assistant's part, for training. Here only its body matters."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = template_environment()(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().astimezone().strftime(form)
    return environment


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Return a value as JSON. jinja2's own filter would escape HTML, and no model was trained on that."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _with_parsed_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the arguments of their calls as objects, which templates expect.

    OpenAI sends them as JSON in a string.
    """
    left = _MOST_VALUES

    def parsed(call: Any) -> Any:
        nonlocal left
        try:
            function = call["function"]
            arguments = parse_json(function["arguments"], left)
            left -= min(count_values(function["arguments"].encode("utf-8", "surrogatepass")), left)
        except (AttributeError, TypeError, KeyError, ValueError, RecursionError):
            return call
        return {**call, "function": {**function, "arguments": arguments}}

    return [
        {**message, "tool_calls": [parsed(call) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def _cut_behind(text: str, content: str) -> str:
    """Return ``text`` up to the end of the last message's content, where the model continues."""
    at = text.rfind(content.strip())
    if at < 0 or not content.strip():
        raise ApiError(400, "continue_final_message: the chat template changes the last message", param="messages")
    return text[: at + len(content.strip())]


def _json(read: ReadFile, name: str) -> dict[str, Any]:
    data = read(name)
    try:
        value = json.loads(data) if data else {}
    except (ValueError, RecursionError) as error:
        raise _bad(f"{name} is not JSON", str(error)) from None
    if not isinstance(value, dict):
        raise _bad(f"{name} has the wrong content", f"expected an object, found {json_kind(value)}")
    return value


def _content(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token)


def _bad(what: str, why: str) -> ApiError:
    return ApiError(500, f"the checkpoint's {what}: {why}", code="bad_checkpoint")
