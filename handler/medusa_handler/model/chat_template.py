"""The checkpoint's own chat template, which turns messages into a prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from medusa_runtime.bounded_json import TooManyValuesError, count_values, parse_json
from medusa_runtime.bounded_template.renderer import RenderingError, TooLongError, template_renderer
from medusa_runtime.errors import ContextLengthError, json_kind

from ..faults import ApiError, ClientDisconnectedError

_MOST_VALUES = 200_000  # in the arguments of all calls together; others stay text
ReadFile = Callable[[str], bytes | None]

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatTemplate:
    """The templates of one checkpoint by name, and its special tokens.

    ``read`` returns a file's bytes or None. ``most_characters`` returns how many a prompt may have, if that is known.
    """

    def __init__(self, read: ReadFile, most_characters: Callable[[], int | None] = lambda: None) -> None:
        self._most_characters = most_characters
        config = _json(read, "tokenizer_config.json")
        tokens = {**_json(read, "special_tokens_map.json"), **config}
        self._special = {name: _content(tokens[name]) for name in _SPECIAL if tokens.get(name) is not None}
        self._sources = _sources(read, config)

    @property
    def source(self) -> str:
        """The text of all templates."""
        return "\n".join(self._sources.values())

    def takes(self, name: str) -> bool:
        """Return whether a template mentions the variable ``name``. If none does, it would not reach the model."""
        return re.search(rf"\b{name}\b", self.source) is not None

    def render(
        self,
        messages: list[dict[str, Any]],
        arguments: Mapping[str, Any],
        is_disconnected: Callable[[], bool] = lambda: False,
    ) -> str:
        """Return the prompt. Raises ApiError 400 if there is no template or it refuses the messages.

        Raises ContextLengthError if it makes a text of them that is certainly too long, and ClientDisconnectedError.
        """
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

        def check() -> None:
            if is_disconnected():
                raise ClientDisconnectedError

        try:
            text = template_renderer().render(
                self._sources[name], values, check=check, most_characters=self._most_characters()
            )
        except TooLongError as error:
            raise ContextLengthError(f"the model's chat template {name!r} {error}", "messages") from error
        except RenderingError as error:
            message = f"the model's chat template {name!r} {error}"
            raise ApiError(400, message, param="messages", code="bad_messages") from error
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


def _with_parsed_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with the arguments of their calls as objects, which templates expect.

    OpenAI sends them as JSON in a string. As in vLLM, none at all and text that is no object, such as that of a call
    which was cut off, become an empty object: a template that needs one would refuse all later turns as well.
    """
    left = _MOST_VALUES

    def parsed(call: Any) -> Any:
        nonlocal left
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            return call
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = parse_json(given := arguments, left)
            except TooManyValuesError:
                return call
            except (ValueError, RecursionError):
                arguments = None
            left -= min(count_values(given.encode("utf-8", "surrogatepass")), left)
        return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, Mapping) else {}}}

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
