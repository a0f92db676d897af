"""The ``system`` and ``messages`` of a request, whose blocks become the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...faults import TEXT_ONLY, invalid, unsupported
from ..body.fields import check_inner_fields
from ..tools.choice import check_name

Message = dict[str, Any]

_ROLES = ("user", "assistant", "system")
# A line with which Claude Code begins its system prompt. It differs with each request, and the model has no use for it.
_BILLING = "x-anthropic-billing-header"
_MEDIA = ("image", "document", "search_result", "container_upload")
# The fields of each kind of block. Of those that are not used, clients return what they were given.
_OF_ALL = frozenset(("type", "cache_control"))
_TEXT = _OF_ALL | {"text", "citations"}
_FIELDS = {
    "text": _TEXT,
    "thinking": _OF_ALL | {"thinking", "signature"},
    "redacted_thinking": _OF_ALL | {"data"},
    "tool_use": _OF_ALL | {"id", "name", "input", "caller", "toolset_name"},
    "tool_result": _OF_ALL | {"tool_use_id", "content", "is_error", "toolset_name"},
}
_KINDS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}


def chat_messages(system: Any, messages: Any) -> list[Message]:
    """Return the messages of a chat. Raises ApiError 400, which names the block at fault.

    As with Anthropic, messages of one role that follow each other are one message.
    """
    found: list[Message] = []
    if system is not None:
        _add(found, "system", _system_text(system, "system"))
    if not isinstance(messages, list) or not messages:
        raise invalid("messages", "a list of at least one message", messages)
    calls: set[str] = set()
    for number, message in enumerate(messages):
        name = f"messages[{number}]"
        if not isinstance(message, Mapping):
            raise invalid(name, "an object with a role and content", message)
        _check_fields(message, name, frozenset(("role", "content")))
        role, content = message.get("role"), message.get("content")
        if role not in _ROLES:
            raise invalid(f"{name}.role", f"one of {', '.join(_ROLES)}", role)
        if role == "user":
            _add_user(found, content, f"{name}.content", calls)
        elif role == "assistant":
            _add_assistant(found, content, f"{name}.content", calls)
        else:
            _add(found, role, _system_text(content, f"{name}.content"))
    if found and "tool_calls" in found[-1]:
        raise invalid("messages", "tool_result blocks behind the tool_use blocks of the last message", "none")
    return found


def with_one_system(messages: list[Message]) -> list[Message]:
    """Return the messages with all of the system's as the first one, for templates that take no other."""
    system = [message["content"] for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": "\n".join(system)}, *others]


def _add_user(found: list[Message], content: Any, name: str, calls: set[str]) -> None:
    """Add a user's message. The results in it become messages of their own, as chat templates expect them."""
    texts: list[str] = []
    blocks = _blocks(content, name, "user")
    for block, place in blocks:
        if block["type"] == "text":
            texts.append(_required(block, "text", place))
            continue
        if texts:
            _add(found, "user", "\n".join(texts))
            texts = []
        call_id = _required(block, "tool_use_id", place)
        if call_id not in calls:
            raise invalid(f"{place}.tool_use_id", "the id of a tool_use block in a message before it", call_id)
        found.append({"role": "tool", "tool_call_id": call_id, "content": _result(block, place)})
    if texts or not blocks:
        _add(found, "user", "\n".join(texts))


def _result(block: Mapping[str, Any], name: str) -> str:
    content, failed = block.get("content"), block.get("is_error")
    if failed is not None and not isinstance(failed, bool):
        raise invalid(f"{name}.is_error", "true or false", failed)
    text = "" if content is None else _joined(content, f"{name}.content", "text of a tool_result")
    # Chat templates have no place for the flag, so the text has to say it.
    return f"Error: {text}".rstrip() if failed and "error" not in text.lower() else text


def _add_assistant(found: list[Message], content: Any, name: str, calls: set[str]) -> None:
    texts, thoughts, made = [], [], []
    for block, place in _blocks(content, name, "assistant"):
        if block["type"] == "text":
            texts.append(_required(block, "text", place))
        elif block["type"] == "thinking":
            thoughts.append(_required(block, "thinking", place))
        elif block["type"] == "tool_use":
            made.append(_call(block, place))
            calls.add(made[-1]["id"])
    _add(found, "assistant", "\n".join(filter(None, texts)))
    message, thought = found[-1], "\n".join(filter(None, thoughts))
    if thought:
        thought = "\n".join(filter(None, (message.get("reasoning"), thought)))
        message |= {"reasoning": thought, "reasoning_content": thought}  # templates differ in which they read
    if made:
        message.setdefault("tool_calls", []).extend(made)


def _call(block: Mapping[str, Any], name: str) -> dict[str, Any]:
    check_name(block.get("name"), f"{name}.name")
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise invalid(f"{name}.input", "an object", arguments)
    function = {"name": block["name"], "arguments": arguments}
    return {"id": _required(block, "id", name), "type": "function", "function": function}


def _add(found: list[Message], role: str, text: str) -> None:
    """Add a text to the last message if it has this role, else as a new one. An empty one of the system is left out."""
    if found and found[-1]["role"] == role:
        found[-1]["content"] = "\n".join(filter(None, (found[-1]["content"], text)))
    elif text or role != "system":
        found.append({"role": role, "content": text})


def _system_text(content: Any, name: str) -> str:
    blocks = _blocks(content, name, "system")
    texts = [_required(block, "text", place) for block, place in blocks]
    return "\n".join(text for text in texts if not text.startswith(_BILLING))


def _joined(content: Any, name: str, what: str) -> str:
    return "\n".join(_required(block, "text", place) for block, place in _blocks(content, name, "system"))


def _blocks(content: Any, name: str, role: str) -> list[tuple[Mapping[str, Any], str]]:
    """Return the blocks of a content, each with its name in errors. Raises ApiError 400 for those of other kinds."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, name)]
    if not isinstance(content, list):
        raise invalid(name, "text or a list of blocks", content)
    found = []
    for number, block in enumerate(content):
        place = f"{name}[{number}]"
        if not isinstance(block, Mapping):
            raise invalid(place, "an object with a type", block)
        kind, known = block.get("type"), _KINDS[role]
        if kind not in known:
            hint = f" ({TEXT_ONLY})" if kind in _MEDIA else ""
            raise unsupported(f"{place}.type", f"{' or '.join(known)}{hint}", kind)
        _check_fields(block, place, _FIELDS[kind])
        found.append((block, place))
    return found


def _check_fields(found: Mapping[str, Any], name: str, known: frozenset[str]) -> None:
    """Raise ApiError 400 for an unknown field. One that is null asks for nothing: clients send all of their types'."""
    check_inner_fields({field: value for field, value in found.items() if value is not None}, name, known)


def _required(block: Mapping[str, Any], field: str, name: str) -> str:
    value = block.get(field)
    if not isinstance(value, str):
        raise invalid(f"{name}.{field}", "text", value)
    return value
