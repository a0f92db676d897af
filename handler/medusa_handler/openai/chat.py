"""/v1/chat/completions: the body's messages, and the choices of the answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_runtime.engine.base import Delta, TokenLogprob

from ..faults import TEXT_ONLY, invalid, unsupported
from .answer import Choice
from .body.parameters import Body, flag
from .logprobs import chat_logprobs, prompt_logprobs
from .token_ids import NO_TOKEN_IDS, TokenIds
from .tools.choice import tools_of
from .tools.formats import CallDelta, Parsed, ToolParser, merge_deltas


def messages(body: Body) -> list[dict[str, Any]]:
    """Return the messages with their content as text. Raises ApiError 400, also for parts that are not text."""
    value = body.get("messages")
    if not isinstance(value, list) or not value:
        raise invalid("messages", "a list of at least one message", value)
    found: list[dict[str, Any]] = []
    for number, message in enumerate(value):
        name = f"messages[{number}]"
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise invalid(name, "an object with a role", message)
        if message.get("content") is None and message["role"] != "assistant":
            raise invalid(f"{name}.content", "text or a list of parts", None)
        text = _text(message.get("content"), f"{name}.content")
        found.append({**message, **_reasoning(message, name), "content": text})
    return found


def _reasoning(message: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the reasoning of an earlier answer under both of its names: templates differ in which they read."""
    for field_name in ("reasoning", "reasoning_content"):
        value = message.get(field_name)
        if value is not None and not isinstance(value, str):
            raise invalid(f"{name}.{field_name}", "text", value)
        if value is not None:
            return {"reasoning": value, "reasoning_content": value}
    return {}


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
            raise unsupported(name, f"parts of type text ({TEXT_ONLY})", kind)
        text = part.get("text", part.get("refusal"))
        if not isinstance(text, str):
            raise invalid(name, "a text part with text", part)
        texts.append(text)
    return "\n".join(texts)


def template_arguments(body: Body) -> dict[str, Any]:
    """Return the arguments of the chat template besides the messages. Raises ApiError 400."""
    tools = tools_of(body)
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
    # Some templates have a switch instead of degrees. As in vLLM, an effort also sets that.
    reasoning = {} if effort is None else {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    return {
        **reasoning,
        **extra,
        "tools": None if tools.choice == "none" else tools.offered or None,
        "documents": documents,
        "add_generation_prompt": prompted,
        "continue_final_message": continuing,
    }


@dataclass(frozen=True)
class ChatFormatter:
    """Makes the choices of a chat's answer.

    ``logprobs`` is the number of alternatives, or None for no log-probabilities. ``parser`` makes a parser for the
    calls in one answer; unless ``parallel``, only the first call counts. ``tool_choice`` is that of ``Tools``.
    ``prompt_logprobs`` is the number of alternatives for each of the prompt's tokens. Unless ``shows_reasoning``, the
    answer leaves the reasoning out. ``role`` is whose message it is. ``prompt_text`` is None unless the answer has it.
    """

    logprobs: int | None
    parser: Callable[[], ToolParser] | None = None
    parallel: bool = True
    tool_choice: str = "none"
    prompt_logprobs: int | None = None
    shows_reasoning: bool = True
    role: str = "assistant"
    token_ids: TokenIds = NO_TOKEN_IDS
    prompt_text: str | None = None
    object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"
    _streams: dict[int, _CallParsing] = field(default_factory=dict)

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": self.role, "content": choice.text, "refusal": None, "reasoning": None}
        reason = choice.finish_reason
        if self.shows_reasoning:
            message["reasoning"] = choice.reasoning or None
        if self.parser is not None and choice.is_answering:
            parsing = _CallParsing(self.parser(), self.parallel)
            found = parsing.take(choice.text, last=True)
            if found.calls:
                message |= {"content": found.content or None, "tool_calls": [_call(call) for call in found.calls]}
                reason = self._reason(reason, parsing)
            else:  # a forced call that was cut before its name leaves nothing
                message["content"] = found.content or (None if self.tool_choice in ("required", "named") else "")
        if choice.reasoning:
            message["content"] = message["content"] or None
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": reason,
            "stop_reason": choice.stop_reason,
        } | ({"token_ids": choice.token_ids} if choice.token_ids is not None else {})

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        return chat_logprobs(tokens, self.logprobs, as_ids=self.token_ids.as_tokens)

    def prompt_copies(self, choices: int) -> int:
        return int(self.prompt_logprobs is not None)

    def beside(self, choices: Sequence[Choice]) -> dict[str, Any]:
        if self.prompt_logprobs is None:
            return self.of_prompt()
        found = choices[0].prompt_logprobs
        scores = None if found is None else prompt_logprobs(found, self.prompt_logprobs)
        return {"prompt_logprobs": scores, **self.of_prompt()}

    def of_prompt(self) -> dict[str, Any]:
        found: dict[str, Any] = {"prompt_token_ids": self.token_ids.prompts[0]} if self.token_ids.returned else {}
        return found if self.prompt_text is None else found | {"prompt_text": self.prompt_text}

    def first_chunks(self, index: int) -> list[dict[str, Any]]:
        return [_chunk(index, {"role": self.role, "content": ""})]

    def chunks(self, index: int, choice: Choice, delta: Delta) -> list[dict[str, Any]]:
        logprobs = self._logprobs(delta.logprobs)
        last, reason = delta.finish_reason is not None, delta.finish_reason
        content: dict[str, Any] = {}
        if choice.reasoning and self.shows_reasoning:
            content["reasoning"] = choice.reasoning
        if self.parser is None:
            if choice.text or choice.parser is None:
                content["content"] = choice.text
        elif choice.is_answering:
            if index not in self._streams:
                self._streams[index] = _CallParsing(self.parser(), self.parallel)
            parsing = self._streams[index]
            found = parsing.take(choice.text, last=last)
            if found.content:
                content["content"] = found.content
            if found.calls:
                content["tool_calls"] = [{"index": call.number, **_call(call)} for call in found.calls]
            reason = self._reason(reason, parsing)
        ended: dict[str, Any] = {"stop_reason": delta.stop_reason} if last else {}
        if self.token_ids.returned:
            ended["token_ids"] = list(delta.token_ids)
        return [_chunk(index, content) | {"logprobs": logprobs, "finish_reason": reason} | ended]

    def _reason(self, reason: str | None, parsing: _CallParsing) -> str | None:
        """Return the finish reason as OpenAI does: "tool_calls" after calls, but "stop" if one function was forced."""
        return "tool_calls" if reason == "stop" and parsing.called and self.tool_choice != "named" else reason


class _CallParsing:
    """The parser of one answer, and whether it has found a call."""

    def __init__(self, parser: ToolParser, parallel: bool) -> None:
        self._parser = parser
        self._parallel = parallel
        self.called = False

    def take(self, text: str, *, last: bool) -> Parsed:
        content, calls = self._parser.push(text)
        if last:
            rest = self._parser.finish()
            content, calls = content + rest.content, merge_deltas([*calls, *rest.calls])
        if not self._parallel:
            calls = [call for call in calls if call.number == 0]
        self.called = self.called or bool(calls)
        return Parsed(content, calls)


def _call(call: CallDelta) -> dict[str, Any]:
    function = {"arguments": call.arguments}
    if call.name is None:
        return {"function": function}
    return {"id": call.id, "type": "function", "function": {"name": call.name, **function}}


def _chunk(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
