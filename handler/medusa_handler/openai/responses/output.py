"""The output of a response, which grows with the model's text, and the events that report it to a stream.

An item is the reasoning, a message, or a call of a function. One follows the other: a text behind a call begins a new
message.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from medusa_runtime.engine.base import TokenLogprob

from ..answer import Choice
from ..logprobs import chat_logprobs
from ..tools.formats import CallDelta, ToolParser

Event = dict[str, Any]


class Output:
    """The items of one response. ``alternatives`` is how many log-probabilities come with each token; None for none.

    ``parser`` finds calls in the text; without one, all of it is a message. Unless ``parallel``, only the first call
    counts. Unless ``shows_reasoning``, the reasoning is no item.
    """

    def __init__(
        self, parser: ToolParser | None, *, parallel: bool, alternatives: int | None, shows_reasoning: bool = True
    ) -> None:
        self.items: list[dict[str, Any]] = []  # those that are complete
        self._parser = parser
        self._parallel = parallel
        self._alternatives = alternatives
        self._shows_reasoning = shows_reasoning
        self._open: _Reasoning | _Message | _Call | None = None
        self._tokens: list[TokenLogprob] = []  # their text has not been reported yet
        self._is_answering = True
        self._separator = ""

    def add(self, choice: Choice) -> Iterator[Event]:
        """Add what has been added to a choice, and yield the events for it."""
        self._is_answering = choice.is_answering
        if self._alternatives is not None:
            self._tokens.extend(choice.logprobs)
        if choice.is_reasoning:
            self._tokens.clear()
        self._separator = "" if choice.parser is None else choice.parser.separator
        for reasoning, text in choice.pieces:
            if reasoning and self._shows_reasoning:
                yield from self._add_reasoning(reasoning)
            yield from self._add_answer(text)

    def _add_answer(self, answer: str) -> Iterator[Event]:
        """Add text that is not reasoning."""
        if self._parser is None:
            yield from self._add_text(answer)
            return
        text = ""
        for character in answer:  # one by one, so that texts and calls stay in order
            content, calls = self._parser.push(character)
            text += content
            if calls:
                yield from self._add_text(text)
                text = ""
                yield from self._add_calls(calls)
        yield from self._add_text(text)

    def finish(self, status: str) -> Iterator[Event]:
        """Yield the events behind the last piece. ``status`` is that of an item that is not whole."""
        if self._parser is not None and self._is_answering:
            content, calls = self._parser.finish()
            yield from self._add_text(content)
            yield from self._add_calls(calls)
        if not self.items and self._open is None:
            yield from self._begin(_Message(0, self._alternatives))
        if isinstance(self._open, _Message) and self._tokens:  # such as the one that ended the answer
            yield self._open.add("", self._take_tokens())
        yield from self._end(status)

    def _add_reasoning(self, text: str) -> Iterator[Event]:
        if not isinstance(self._open, _Reasoning):
            text = self._without_separator(text, "reasoning")
            yield from self._end("completed")
            yield from self._begin(_Reasoning(len(self.items)))
        assert isinstance(self._open, _Reasoning)
        yield self._open.add(text)

    def _add_text(self, text: str) -> Iterator[Event]:
        if not text:
            return
        if not isinstance(self._open, _Message):
            text = self._without_separator(text, "message")
            yield from self._end("completed")
            yield from self._begin(_Message(len(self.items), self._alternatives))
        assert isinstance(self._open, _Message)
        yield self._open.add(text, self._take_tokens())

    def _without_separator(self, text: str, kind: str) -> str:
        """Return the text of a new item without what separates it from the text of an item of its kind before it."""
        return text.removeprefix(self._separator) if any(item["type"] == kind for item in self.items) else text

    def _add_calls(self, calls: list[CallDelta]) -> Iterator[Event]:
        for call in calls:
            self._tokens.clear()  # they are not a text's
            if call.number and not self._parallel:
                continue
            if call.name is not None:
                yield from self._end("completed")
                yield from self._begin(_Call(len(self.items), call.id or "", call.name))
            assert isinstance(self._open, _Call)
            if call.arguments:
                yield self._open.add(call.arguments)

    def _begin(self, item: _Reasoning | _Message | _Call) -> Iterator[Event]:
        self._open = item
        yield from item.begin()

    def _end(self, status: str) -> Iterator[Event]:
        if self._open is not None:
            yield from self._open.end(status)
            self.items.append(self._open.item)
            self._open = None

    def _take_tokens(self) -> list[TokenLogprob]:
        tokens, self._tokens = self._tokens, []
        return tokens


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

    def add(self, text: str) -> Event:
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

    def add(self, text: str, tokens: list[TokenLogprob]) -> Event:
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

    def _logprobs(self, tokens: list[TokenLogprob]) -> list[dict[str, Any]]:
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

    def add(self, arguments: str) -> Event:
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
