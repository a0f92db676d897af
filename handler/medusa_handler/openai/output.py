"""The items of an answer, which grow with the model's text, and the events that report them to a stream.

An item is the reasoning, a message, or a call of a function. One follows the other: a text behind a call begins a new
message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from medusa_runtime.engine.base import TokenLogprob

from .answer import Choice
from .tools.formats import CallDelta, ToolParser

Event = dict[str, Any]


class Item(Protocol):
    """A part of an answer that grows with the model's text: its reasoning, a message, or a call of a function."""

    @property
    def item(self) -> dict[str, Any]:
        """The whole item, once it has ended."""

    def begin(self) -> Iterator[Event]: ...

    def add(self, text: str, tokens: Sequence[TokenLogprob] = ()) -> Event:
        """Add text, or a part of a call's arguments."""

    def end(self, status: str) -> Iterator[Event]: ...


class ItemKinds(Protocol):
    """Makes the items of one HTTP interface. ``index`` is an item's place in the answer."""

    def reasoning(self, index: int) -> Item: ...

    def message(self, index: int) -> Item: ...

    def call(self, index: int, call_id: str, name: str) -> Item: ...


class Output:
    """The items of one answer, which ``kinds`` makes.

    ``parser`` finds calls in the text; without one, all of it is a message. Unless ``parallel``, only the first call
    counts. Unless ``shows_reasoning``, the reasoning is no item. With ``keeps_tokens``, the text comes with its tokens'
    log-probabilities.
    """

    def __init__(
        self,
        parser: ToolParser | None,
        kinds: ItemKinds,
        *,
        parallel: bool,
        shows_reasoning: bool = True,
        keeps_tokens: bool = False,
    ) -> None:
        self.items: list[dict[str, Any]] = []  # those that are complete
        self._parser = parser
        self._kinds = kinds
        self._parallel = parallel
        self._shows_reasoning = shows_reasoning
        self._keeps_tokens = keeps_tokens
        self._open: Item | None = None
        self._kind = ""  # of the open item, or of the last one
        self._had: set[str] = set()  # the kinds of all that are complete
        self._tokens: list[TokenLogprob] = []  # their text has not been reported yet
        self._is_answering = True
        self._separator = ""

    def add(self, choice: Choice) -> Iterator[Event]:
        """Add what has been added to a choice, and yield the events for it."""
        self._is_answering = choice.is_answering
        if self._keeps_tokens:
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
            yield from self._begin("message", self._kinds.message(0))
        if self._open is not None and self._kind == "message" and self._tokens:  # such as the one that ended the answer
            yield self._open.add("", self._take_tokens())
        yield from self._end(status)

    def _add_reasoning(self, text: str) -> Iterator[Event]:
        if self._kind != "reasoning":
            text = self._without_separator(text, "reasoning")
            yield from self._end("completed")
            yield from self._begin("reasoning", self._kinds.reasoning(len(self.items)))
        assert self._open is not None
        yield self._open.add(text)

    def _add_text(self, text: str) -> Iterator[Event]:
        if not text:
            return
        if self._kind != "message":
            text = self._without_separator(text, "message")
            yield from self._end("completed")
            yield from self._begin("message", self._kinds.message(len(self.items)))
        assert self._open is not None
        yield self._open.add(text, self._take_tokens())

    def _without_separator(self, text: str, kind: str) -> str:
        """Return the text of a new item without what separates it from the text of an item of its kind before it."""
        return text.removeprefix(self._separator) if kind in self._had else text

    def _add_calls(self, calls: list[CallDelta]) -> Iterator[Event]:
        for call in calls:
            self._tokens.clear()  # they are not a text's
            if call.number and not self._parallel:
                continue
            if call.name is not None:
                yield from self._end("completed")
                yield from self._begin("call", self._kinds.call(len(self.items), call.id or "", call.name))
            assert self._open is not None
            if call.arguments:
                yield self._open.add(call.arguments)

    def _begin(self, kind: str, item: Item) -> Iterator[Event]:
        self._kind, self._open = kind, item
        yield from item.begin()

    def _end(self, status: str) -> Iterator[Event]:
        if self._open is not None:
            yield from self._open.end(status)
            self.items.append(self._open.item)
            self._had.add(self._kind)
            self._open = None

    def _take_tokens(self) -> list[TokenLogprob]:
        tokens, self._tokens = self._tokens, []
        return tokens
