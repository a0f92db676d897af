"""The items of a response in OpenAI's form, and the events that report them to a stream."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

from medusa_runtime.engine.base import TokenLogprob

from ..logprobs import chat_logprobs
from ..output import Event, Output
from ..tools.formats import ToolParser


def response_output(
    parser: ToolParser | None, *, parallel: bool, alternatives: int | None, shows_reasoning: bool = True
) -> Output:
    """Return the output of a response. ``alternatives`` is how many log-probabilities come with each token, or None."""
    kinds = _Items(alternatives)
    return Output(
        parser, kinds, parallel=parallel, shows_reasoning=shows_reasoning, keeps_tokens=alternatives is not None
    )


class _Items:
    def __init__(self, alternatives: int | None) -> None:
        self._alternatives = alternatives

    def reasoning(self, index: int) -> _Reasoning:
        return _Reasoning(index)

    def message(self, index: int) -> _Message:
        return _Message(index, self._alternatives)

    def call(self, index: int, call_id: str, name: str) -> _Call:
        return _Call(index, call_id, name)


class _Reasoning:
    """The reasoning before an answer."""

    def __init__(self, index: int) -> None:
        self.item: dict[str, Any] = {
            "id": f"rs_{os.urandom(16).hex()}",
            "type": "reasoning",
            "status": "in_progress",
            "summary": [],
            "content": [],
        }
        self._of_item = {"item_id": self.item["id"], "output_index": index, "content_index": 0}
        self._index = index
        self._texts: list[str] = []

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "output_index": self._index, "item": dict(self.item)}
        yield {"type": "response.content_part.added", **self._of_item, "part": self._part()}

    def add(self, text: str, tokens: Sequence[TokenLogprob] = ()) -> Event:
        self._texts.append(text)
        return {"type": "response.reasoning_text.delta", **self._of_item, "delta": text}

    def end(self, status: str) -> Iterator[Event]:
        part = self._part()
        self.item |= {"status": status, "content": [part]}
        yield {"type": "response.reasoning_text.done", **self._of_item, "text": part["text"]}
        yield {"type": "response.content_part.done", **self._of_item, "part": part}
        yield {"type": "response.output_item.done", "output_index": self._index, "item": self.item}

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": "".join(self._texts)}


class _Message:
    """A message with one text. ``alternatives`` is how many log-probabilities come with each token."""

    def __init__(self, index: int, alternatives: int | None) -> None:
        self.item: dict[str, Any] = {
            "id": f"msg_{os.urandom(16).hex()}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [],
        }
        self._of_item = {"item_id": self.item["id"], "output_index": index, "content_index": 0}
        self._index = index
        self._texts: list[str] = []
        self._alternatives = alternatives or 0
        self._tokens: list[TokenLogprob] = []  # in a form of a third of the size of what is sent

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "output_index": self._index, "item": dict(self.item)}
        yield {"type": "response.content_part.added", **self._of_item, "part": self._part()}

    def add(self, text: str, tokens: Sequence[TokenLogprob] = ()) -> Event:
        self._texts.append(text)
        self._tokens += tokens
        shown = _without_bytes(self._logprobs(tokens))
        return {"type": "response.output_text.delta", **self._of_item, "delta": text, "logprobs": shown}

    def end(self, status: str) -> Iterator[Event]:
        part = self._part()
        self._tokens.clear()
        self.item |= {"status": status, "content": [part]}
        done = {"text": part["text"], "logprobs": _without_bytes(part["logprobs"])}
        yield {"type": "response.output_text.done", **self._of_item, **done}
        yield {"type": "response.content_part.done", **self._of_item, "part": part}
        yield {"type": "response.output_item.done", "output_index": self._index, "item": self.item}

    def _part(self) -> dict[str, Any]:
        logprobs = self._logprobs(self._tokens)
        return {"type": "output_text", "text": "".join(self._texts), "annotations": [], "logprobs": logprobs}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = chat_logprobs(tokens, self._alternatives)["content"]
        return found


class _Call:
    """A call of a function."""

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self.item: dict[str, Any] = {
            "id": f"fc_{os.urandom(16).hex()}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": call_id,
            "name": name,
            "arguments": "",
        }
        self._of_item = {"item_id": self.item["id"], "output_index": index}
        self._index = index
        self._arguments: list[str] = []

    def begin(self) -> Iterator[Event]:
        yield {"type": "response.output_item.added", "output_index": self._index, "item": dict(self.item)}

    def add(self, arguments: str, tokens: Sequence[TokenLogprob] = ()) -> Event:
        self._arguments.append(arguments)
        return {"type": "response.function_call_arguments.delta", **self._of_item, "delta": arguments}

    def end(self, status: str) -> Iterator[Event]:
        arguments = "".join(self._arguments)
        self.item |= {"status": "completed" if _is_whole(arguments) else status, "arguments": arguments}
        yield {"type": "response.function_call_arguments.done", **self._of_item, "arguments": arguments}
        yield {"type": "response.output_item.done", "output_index": self._index, "item": self.item}


def _without_bytes(logprobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return log-probabilities in the form of events, which unlike the part do not have the tokens' bytes."""
    return [
        {"token": each["token"], "logprob": each["logprob"],
         "top_logprobs": [{"token": top["token"], "logprob": top["logprob"]} for top in each["top_logprobs"]]}
        for each in logprobs
    ]  # fmt: skip


def _is_whole(arguments: str) -> bool:
    try:
        json.loads(arguments)
    except (ValueError, RecursionError):
        return False
    return True
