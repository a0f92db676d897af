"""The ``input`` of a request: text or items, which become the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...faults import TEXT_ONLY, ApiError, invalid, unsupported
from ..body.fields import Refusal, check_inner_fields
from ..tools.choice import check_name

_ROLES = ("user", "assistant", "system", "developer")
_PARTS = ("input_text", "output_text", "refusal")
_REASONING_PARTS = ("reasoning_text", "summary_text")
_KINDS = ("message", "reasoning", "function_call", "function_call_output")
_HINTS = {
    **dict.fromkeys(("input_image", "input_file", "input_audio"), TEXT_ONLY),
    "text": "OpenAI's name of it in chats",
    "item_reference": "nothing is kept from earlier responses; send the item itself",
}
# The fields of each kind of item. Of those that are not used, clients return what they were given.
_MESSAGE = frozenset(("type", "role", "content", "id", "status", "phase"))
_REASONING = frozenset(("type", "summary", "content", "id", "status"))
_REFUSED = {"encrypted_content": Refusal("only OpenAI can read it; send the text as content")}
_CALL = frozenset(("type", "call_id", "name", "arguments", "id", "status", "parsed_arguments"))
_OUTPUT = frozenset(("type", "call_id", "output", "id", "status", "name"))
_PART = frozenset(("type", "text", "refusal", "annotations", "logprobs", "parsed", "prompt_cache_breakpoint"))


def messages(value: Any, instructions: str | None) -> list[dict[str, Any]]:
    """Return the messages of a chat for ``input`` and ``instructions``. Raises ApiError 400, which names the item."""
    found = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(value, str):
        if not value:
            raise invalid("input", "text that is not empty, or a list of items", value)
        return [*found, {"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise invalid("input", "text, or a list of at least one item", value)
    calls: set[str] = set()
    for number, item in enumerate(value):
        name = f"input[{number}]"
        if not isinstance(item, Mapping):
            raise invalid(name, "an object with a type", item)
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            _add_message(found, _message(item, name))
        elif kind == "reasoning":
            found.append(_reasoning(item, name))
        elif kind == "function_call":
            call = _call(item, name)
            calls.add(call["id"])
            _add_call(found, call)
        elif kind == "function_call_output":
            found.append(_output(item, name, calls))
        else:
            raise _unsupported(f"{name}.type", kind, _KINDS)
    return found


def _message(item: Mapping[str, Any], name: str) -> dict[str, Any]:
    _check_fields(item, name, _MESSAGE)
    role = item.get("role")
    if role not in _ROLES:
        raise invalid(f"{name}.role", f"one of {', '.join(_ROLES)}", role)
    return {"role": role, "content": _text(item.get("content"), f"{name}.content")}


def _add_message(found: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Add a message. An assistant's becomes one with the reasoning before it."""
    last = found[-1] if found and message["role"] == "assistant" else {}
    if "reasoning" in last and not last["content"] and "tool_calls" not in last:
        last["content"] = message["content"]
    else:
        found.append(message)


def _reasoning(item: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return an assistant's message with the reasoning, or as in vLLM its summary, and without an answer yet."""
    _check_fields(item, name, _REASONING)
    given = {field: item[field] for field in ("content", "summary") if item.get(field) is not None}
    texts = [_text(value, f"{name}.{field}", _REASONING_PARTS) for field, value in given.items()]
    text = next(filter(None, texts), "")
    return {"role": "assistant", "content": "", "reasoning": text, "reasoning_content": text}


def _call(item: Mapping[str, Any], name: str) -> dict[str, Any]:
    _check_fields(item, name, _CALL)
    check_name(item.get("name"), f"{name}.name")
    call_id, arguments = _required(item, "call_id", name), _required(item, "arguments", name)
    return {"id": call_id, "type": "function", "function": {"name": item["name"], "arguments": arguments}}


def _add_call(found: list[dict[str, Any]], call: dict[str, Any]) -> None:
    """Add a call to the assistant's message before it, if there is one: templates expect them in one message."""
    if found and found[-1]["role"] == "assistant":
        found[-1].setdefault("tool_calls", []).append(call)
    else:
        found.append({"role": "assistant", "content": "", "tool_calls": [call]})


def _output(item: Mapping[str, Any], name: str, calls: set[str]) -> dict[str, Any]:
    _check_fields(item, name, _OUTPUT)
    call_id = _required(item, "call_id", name)
    if call_id not in calls:
        raise invalid(
            f"{name}.call_id",
            "the call_id of a function_call before it in the input (nothing is kept from earlier responses)",
            call_id,
        )
    return {"role": "tool", "tool_call_id": call_id, "content": _text(item.get("output"), f"{name}.output")}


def _check_fields(found: Mapping[str, Any], name: str, known: frozenset[str]) -> None:
    """Raise ApiError 400 for an unknown field. One that is null asks for nothing: clients send all of their types'."""
    check_inner_fields({field: value for field, value in found.items() if value is not None}, name, known, _REFUSED)


def _required(item: Mapping[str, Any], field: str, name: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise invalid(f"{name}.{field}", "text", value)
    return value


def _text(content: Any, name: str, known: tuple[str, ...] = _PARTS) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(name, "text or a list of parts", content)
    texts = []
    for number, part in enumerate(content):
        place = f"{name}[{number}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in known:
            raise _unsupported(f"{place}.type", kind, known)
        _check_fields(part, place, _PART)
        texts.append(_required(part, "refusal" if kind == "refusal" else "text", place))
    return "\n".join(texts)


def _unsupported(param: str, kind: Any, known: tuple[str, ...]) -> ApiError:
    hint = f" ({_HINTS[kind]})" if isinstance(kind, str) and kind in _HINTS else ""
    return unsupported(param, f"{', '.join(known[:-1])} or {known[-1]}{hint}", kind)
