"""/v1/chat/completions: the body's messages, and the shape of the answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from medusa_runtime.engine.base import Delta
from medusa_runtime.errors import shown

from ..faults import ApiError
from .answer import Choice
from .logprobs import chat_logprobs
from .parameters import Body, flag, invalid


def messages(body: Body) -> list[dict[str, Any]]:
    """The messages with their content as text. Raises ApiError 400; parts that are not text are refused."""
    value = body.get("messages")
    if not isinstance(value, list) or not value:
        raise invalid("messages", "a list of at least one message", value)
    found = []
    for number, message in enumerate(value):
        name = f"messages[{number}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise invalid(name, "an object with a role", message)
        if message.get("content") is None and message["role"] != "assistant":
            raise invalid(f"{name}.content", "text or a list of parts", None)
        found.append({**message, "content": _text(message.get("content"), f"{name}.content")})
    return found


def _text(content: Any, name: str) -> str:
    if content is None:  # an assistant's message that only calls tools
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(name, "text or a list of parts", content)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "refusal"):
            raise ApiError(
                400,
                f"{name}: this model takes text only, found a part of type {shown(kind)}",
                param=name,
                code="unsupported_value",
            )
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise invalid(name, "a text part with text", part)
        texts.append(text)
    return "\n".join(texts)


def template_arguments(body: Body) -> dict[str, Any]:
    """The arguments of the chat template besides the messages. Raises ApiError 400."""
    tools = body.get("tools") or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, Mapping) for tool in tools)):
        raise invalid("tools", "a list of objects", tools)
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise ApiError(
            400, 'tool_choice: only "auto" and "none" are supported', param="tool_choice", code="unsupported_value"
        )
    extra = body.get("chat_template_kwargs") or {}
    if not isinstance(extra, Mapping):
        raise invalid("chat_template_kwargs", "an object", extra)
    documents = body.get("documents")
    if documents is not None and not (isinstance(documents, list) and all(isinstance(d, Mapping) for d in documents)):
        raise invalid("documents", "a list of objects", documents)
    effort = body.get("reasoning_effort")
    if effort is not None and not isinstance(effort, str):
        raise invalid("reasoning_effort", "text", effort)
    continuing = flag(body, "continue_final_message")
    prompted = flag(body, "add_generation_prompt", not continuing)
    if continuing and prompted:
        raise invalid("add_generation_prompt", "false with continue_final_message", prompted)
    return {
        **({} if effort is None else {"reasoning_effort": effort}),
        **extra,
        "tools": None if choice == "none" else tools,
        "documents": documents,
        "add_generation_prompt": prompted,
        "continue_final_message": continuing,
    }


@dataclass(frozen=True)
class ChatShape:
    """``logprobs`` is the number of alternatives, or None for no log-probabilities."""

    logprobs: int | None
    object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": None if self.logprobs is None else chat_logprobs(choice.logprobs, self.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def first_chunks(self, index: int) -> list[dict[str, Any]]:
        return [_chunk(index, {"role": "assistant", "content": ""})]

    def chunk(self, index: int, choice: Choice, delta: Delta) -> dict[str, Any]:
        logprobs = None if self.logprobs is None else chat_logprobs(delta.logprobs, self.logprobs)
        content = {"content": delta.text} if delta.text or delta.finish_reason is None else {}
        return _chunk(index, content) | {"logprobs": logprobs, "finish_reason": delta.finish_reason}


def _chunk(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
