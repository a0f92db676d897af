"""The formats in which models write calls of tools, and parsers that find the calls while the text comes.

Hermes and Qwen write ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, Llama 3 ``{"name": …, "parameters":
{…}}`` alone, perhaps behind ``<|python_tag|>``, several with ``;`` between them, and Mistral ``[TOOL_CALLS]`` and a
list of such objects or, in newer versions, a name and its arguments. gpt-oss writes calls as messages for functions
(``harmony``). vLLM has parsers of the same names for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple, Protocol

from medusa_runtime.engine.base import StructuredOutputs

from ...model.harmony import TEMPLATE_MARKER, MessageScanner, Piece, TextJoiner, forced_calls
from .scanner import CallScanner, ValueScanner

_SPACE = " \t\r\n"


class CallDelta(NamedTuple):
    """The next part of a call. Only the first part has ``id`` and ``name``."""

    number: int
    id: str | None
    name: str | None
    arguments: str


class Parsed(NamedTuple):
    """The content and the parts of calls that have become certain with a piece of text."""

    content: str
    calls: list[CallDelta]


class ToolParser(Protocol):
    """A parser that separates the calls in one text from its other content."""

    def push(self, text: str) -> Parsed: ...

    def finish(self) -> Parsed:
        """Return what was held back, at the end of the text."""


def _call_id() -> str:
    return f"call_{os.urandom(16).hex()[:24]}"


def _short_id() -> str:
    """Return an id of nine letters and digits, the only form that Mistral's templates take."""
    return os.urandom(16).hex()[:9]


class _CharacterParser:
    """A parser that takes the text character by character. Subclasses handle the characters outside of a call."""

    new_id: Callable[[], str] = staticmethod(_call_id)

    def __init__(self) -> None:
        self._content: list[str] = []
        self._space: list[str] = []  # held back, because space before a call is not content
        self._calls: list[CallDelta] = []
        self._count = 0
        self._scanner: CallScanner | None = None
        self._call_started = False

    def push(self, text: str) -> Parsed:
        for character in text:
            if self._scanner is not None:
                self._scan(self._scanner, character)
            else:
                self.outside(character)
        return self._flush()

    def finish(self) -> Parsed:
        if self._scanner is not None and not self._call_started:
            self.refuse(self.opening() + self._scanner.raw)
        self._scanner = None
        self.end()
        if not self._count:
            self._content += self._space
        return self._flush()

    def outside(self, character: str) -> None:
        raise NotImplementedError

    def opening(self) -> str:
        """Return the text before what turned out not to be a call."""
        return ""

    def end(self) -> None:
        """Handle the end of the text, outside of a call."""

    def accepts(self, name: str) -> bool:
        return True

    def add_content(self, text: str) -> None:
        """Add content. Trailing space is held back until more content follows."""
        kept = text.rstrip(_SPACE)
        if kept:
            self._content += [*self._space, kept]
            self._space = []
        self._space.append(text[len(kept) :])

    def begin(self) -> None:
        self._scanner = CallScanner()
        self._call_started = False

    def start_call(self, name: str) -> None:
        """Begin a call in the answer."""
        self._space = []
        self._calls.append(CallDelta(self._count, self.new_id(), name, ""))
        self._count += 1
        self._call_started = True

    def add_arguments(self, text: str) -> None:
        if text:
            self._calls.append(CallDelta(self._count - 1, None, None, text))

    def _scan(self, scanner: CallScanner, character: str) -> None:
        scanner.feed(character)
        if scanner.name is not None and not self._call_started:
            if self.accepts(scanner.name):
                self.start_call(scanner.name)
            else:
                scanner.failed = True
        if self._call_started:
            self.add_arguments(scanner.take())
        if scanner.failed and not self._call_started:
            self._scanner = None
            self.refuse(self.opening() + scanner.raw)
        elif scanner.done or scanner.failed:
            self._scanner = None

    def refuse(self, raw: str) -> None:
        """Take text that looked like a call as content."""
        self.add_content(raw)

    def _flush(self) -> Parsed:
        found = Parsed("".join(self._content), merge_deltas(self._calls))
        self._content, self._calls = [], []
        return found


class MarkerParser(_CharacterParser):
    """Content up to a marker, calls behind it."""

    marker = ""

    def __init__(self) -> None:
        super().__init__()
        self._held = ""

    def outside(self, character: str) -> None:
        self._held += character
        if self._held == self.marker:
            self._held = ""
            self.after_marker()
            return
        while self._held and not self.marker.startswith(self._held):
            self.add_content(self._held[0])
            self._held = self._held[1:]

    def end(self) -> None:
        self.add_content(self._held)
        self._held = ""

    def opening(self) -> str:
        return self.marker

    def after_marker(self) -> None:
        self.begin()


class HermesParser(MarkerParser):
    marker = "<tool_call>"
    _closing = "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._behind: str | None = None  # the part of the closing tag that has come

    def outside(self, character: str) -> None:
        if self._behind is not None and self._behind != self._closing:
            if not self._behind and character in _SPACE:
                return
            self._behind += character
            if self._closing.startswith(self._behind):
                return
            held, self._behind = self._behind, self._closing
            for each in held:
                super().outside(each)
            return
        super().outside(character)

    def start_call(self, name: str) -> None:
        super().start_call(name)
        self._behind = ""


class MistralParser(MarkerParser):
    marker = "[TOOL_CALLS]"
    new_id = staticmethod(_short_id)

    def __init__(self) -> None:
        super().__init__()
        self._state = "text"  # text, open (behind the marker), list, name, arguments
        self._unclaimed: list[str] = []  # from the marker or the last call on; content if no call follows
        self._has_call = False  # behind this marker
        self._value: ValueScanner | None = None

    def after_marker(self) -> None:
        self._state = "open"
        self._unclaimed = [self.marker]
        self._has_call = False

    def outside(self, character: str) -> None:
        if self._state == "text":
            super().outside(character)
        elif self._state == "arguments":
            self._in_arguments(character)
        elif self._state in ("open", "list") and character == "{":
            self._state = "list"
            self.begin()
            assert self._scanner is not None
            self._scanner.feed(character)
        else:
            self._unclaimed.append(character)
            if self._state == "open":
                self._state = "list" if character == "[" else "open" if character in _SPACE else "name"
            elif self._state == "list":
                self._in_list(character)
            elif character == "{":
                self._end_name()

    def start_call(self, name: str) -> None:
        super().start_call(name)
        self._unclaimed = []
        self._has_call = True

    def opening(self) -> str:
        return "".join(self._unclaimed)

    def refuse(self, raw: str) -> None:
        super().refuse(raw)
        self._unclaimed = []

    def _in_list(self, character: str) -> None:
        if character == "]" and self._has_call:
            self._state = "text"
        elif character not in _SPACE + ",":
            self._state = "text"
            self.refuse(self.opening())

    def _end_name(self) -> None:
        """Begin a call whose name came before its arguments, at the brace that begins these."""
        name = "".join(self._unclaimed[1:-1]).split("[CALL_ID]")[0].removesuffix("[ARGS]").strip()
        if not name:
            self._state = "text"
            self.refuse(self.opening())
            return
        self.start_call(name)
        self._value = ValueScanner()
        self._state = "arguments"
        self._in_arguments("{")

    def _in_arguments(self, character: str) -> None:
        assert self._value is not None
        self._value.feed(character)
        self.add_arguments(character)
        if self._value.done:
            self._state = "text"

    def end(self) -> None:
        if self._state in ("open", "list", "name") and not self._has_call:
            self.refuse(self.opening())
        super().end()


class Llama3Parser(_CharacterParser):
    """Calls only count if the text is nothing but calls. ``names`` are those of the request's tools."""

    _tag = "<|python_tag|>"

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._names = names
        self._before: list[str] = []
        self._bare = ""  # the same without space: the beginning of the tag
        self._is_text = False

    def accepts(self, name: str) -> bool:
        return name in self._names

    def outside(self, character: str) -> None:
        if self._is_text:
            self.add_content(character)
        elif character == "{" and self._bare in ("", self._tag):
            self.begin()
            assert self._scanner is not None
            self._scanner.feed(character)
        elif character in _SPACE or (character == ";" and self._count and not self._bare):
            self._before.append(character)
        else:
            follows = not self._bare or self._before[-1] not in _SPACE
            self._before.append(character)
            self._bare += character
            if not follows or not self._tag.startswith(self._bare):
                self.refuse(self.opening())

    def opening(self) -> str:
        return "".join(self._before)

    def start_call(self, name: str) -> None:
        super().start_call(name)
        self._before, self._bare = [], ""

    def refuse(self, raw: str) -> None:
        self._is_text = True
        self._before, self._bare = [], ""
        self.add_content(raw)

    def end(self) -> None:
        if not self._count:
            self.add_content(self.opening())


class HarmonyCallParser:
    """Content and calls of gpt-oss. Without ``names``, as nothing was offered, calls are left out."""

    def __init__(self, names: frozenset[str]) -> None:
        self._takes_calls = bool(names)
        self._scanner = MessageScanner()
        self._content = TextJoiner()
        self._count = 0

    def push(self, text: str) -> Parsed:
        return self._parsed(self._scanner.push(text, last=False))

    def finish(self) -> Parsed:
        return self._parsed(self._scanner.push("", last=True))

    def _parsed(self, pieces: list[Piece]) -> Parsed:
        content: list[str] = []
        calls: list[CallDelta] = []
        for piece in pieces:
            if piece.kind == "call" and self._takes_calls:
                if piece.begins:
                    self._count += 1
                    calls.append(CallDelta(self._count - 1, _call_id(), piece.name, ""))
                else:
                    calls.append(CallDelta(self._count - 1, None, None, piece.text))
            elif piece.kind in ("content", "reasoning"):  # reasoning only if nothing has taken it before
                content.append(self._content.take(piece))
        return Parsed("".join(content), merge_deltas(calls))


class ForcedCallsParser(_CharacterParser):
    """A list of calls, to which structured outputs restrict the text. No part is content, even if it is cut off."""

    def __init__(self, new_id: Callable[[], str] = _call_id) -> None:
        super().__init__()
        self.new_id = new_id

    def outside(self, character: str) -> None:
        if character == "{":
            self.begin()
            assert self._scanner is not None
            self._scanner.feed(character)

    def refuse(self, raw: str) -> None:
        """Drop the beginning of a call that ``max_tokens`` cut before its name."""


class NamedCallParser:
    """A text that is nothing but the arguments of one call."""

    def __init__(self, name: str, new_id: Callable[[], str] = _call_id) -> None:
        self._first: CallDelta | None = CallDelta(0, new_id(), name, "")

    def push(self, text: str) -> Parsed:
        calls = [self._first] if self._first is not None else []
        self._first = None
        return Parsed("", merge_deltas([*calls, CallDelta(0, None, None, text)] if text else calls))

    def finish(self) -> Parsed:
        return self.push("")


class Format(NamedTuple):
    """A format of calls. ``template_markers`` are what chat templates of it contain; ``new_id`` makes a call's id.

    ``forced`` returns the form of calls of functions, by name and schema, if all of an answer is in this format.
    """

    name: str
    template_markers: tuple[str, ...]
    parser: Callable[[frozenset[str]], ToolParser]
    new_id: Callable[[], str] = _call_id
    forced: Callable[[dict[str, object]], StructuredOutputs] | None = None


HARMONY = Format("openai", (TEMPLATE_MARKER,), HarmonyCallParser, forced=forced_calls)


FORMATS = (
    Format("mistral", ("[TOOL_CALLS]",), lambda names: MistralParser(), _short_id),
    Format("hermes", ("<tool_call>",), lambda names: HermesParser()),
    Format("llama3_json", ("<|python_tag|>", '{"name": function name, "parameters":'), Llama3Parser),
    HARMONY,
)


def format_of(name: str, template: str) -> Format | None:
    """Return the format with this name; for ``auto``, the one that a chat template describes. None if there is none."""
    if name == "auto":
        return next((format for format in FORMATS if any(sign in template for sign in format.template_markers)), None)
    return next((format for format in FORMATS if format.name == name), None)


def merge_deltas(calls: list[CallDelta]) -> list[CallDelta]:
    """Merge the deltas of each call into one."""
    first: dict[int, CallDelta] = {}
    arguments: dict[int, list[str]] = {}
    for call in calls:
        first.setdefault(call.number, call)
        arguments.setdefault(call.number, []).append(call.arguments)
    return [call._replace(arguments="".join(arguments[number])) for number, call in first.items()]
