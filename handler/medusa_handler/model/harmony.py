"""OpenAI's harmony format, in which gpt-oss answers: messages in channels, between special tokens.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>

``analysis`` is the reasoning, ``final`` the answer, and ``commentary`` a call if its header names a function
(``to=functions.NAME``), else text that is meant for the user. The format is described in OpenAI's cookbook
("OpenAI harmony response format"). A text that is none of it is not an error: what has no header is content.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from medusa_runtime.engine.base import StructuredOutputs

NAME = "openai_gptoss"  # vLLM's
TEMPLATE_MARKER = "<|channel|>analysis<|message|>"
EFFORTS = ("low", "medium", "high")
SEPARATOR = "\n"  # between the texts of two messages

_START, _CHANNEL, _CONSTRAIN, _MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_MARKERS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
_MARKER = re.compile("|".join(map(re.escape, _MARKERS)))
_LONGEST = max(map(len, _MARKERS))
_OF_HEADERS = re.compile(r"<\|(?:channel|constrain)\|>")
_TO = "to="
_FUNCTIONS = "functions."
# Those whom a message may be for without being a call of a caller's function: the model itself, and OpenAI's own tools.
_NO_FUNCTIONS = ("assistant", "python", "browser", "container")
_MOST_WORDS = 2  # of a header beside its recipient: the channel and the type of the content
_ASSISTANT = f"{_START}assistant"

Kind = Literal["reasoning", "content", "call", "other"]


class Piece(NamedTuple):
    """A part of a message's text. The first part of a message ``begins`` it, and has no text.

    ``name`` is that of the function that is called. Text ``behind`` the end of a message belongs to it, too.
    """

    kind: Kind
    text: str
    begins: bool = False
    name: str = ""
    behind: bool = False


class MessageScanner:
    """Finds the messages in a text that comes in pieces.

    The text begins behind ``<|start|>assistant`` and ``begun``, the first message as far as the prompt has it.
    """

    def __init__(self, begun: str = "") -> None:
        self.kind: Kind | None = None  # of the message whose text comes; None in a header, and between messages
        self._name = ""
        self._last: Kind | None = None  # the kind of the last message
        self._in_header = False
        self._names_author = False  # whether the header begins with the author
        self._head: list[str] = []  # the header so far, or what may be the beginning of one
        self._bare = ""  # the first characters of that, without space
        self._held = ""  # may be the beginning of a marker
        self._found: list[Piece] = []
        if self.push(begun, last=False) and self.kind is not None:
            self._found = [Piece(self.kind, "", True, self._name)]

    def push(self, text: str, *, last: bool) -> list[Piece]:
        """Return the parts of messages that have become certain with a piece of the text."""
        text = self._held + text
        at = 0
        for match in _MARKER.finditer(text):
            self._take_text(text[at : match.start()])
            self._take_marker(match[0])
            at = match.end()
        stop = len(text) if last else _held_from(text, at)
        self._take_text(text[at:stop])
        self._held = text[stop:]
        if last and self.kind is None:
            self._give_up_header()
        found, self._found = self._found, []
        return found

    def _take_text(self, text: str) -> None:
        if not text:
            return
        if self.kind is not None:
            self._found.append(Piece(self.kind, text, name=self._name))
            return
        self._head.append(text)
        if self._in_header:
            return
        self._bare = (self._bare + text if self._bare else text.lstrip())[: len(_TO)]
        if self._bare == _TO:
            self._in_header = True
        elif not _TO.startswith(self._bare):
            self._take_as_content("".join(self._head))

    def _take_marker(self, marker: str) -> None:
        if self.kind is not None:
            if marker == _START or marker in _ENDS:
                self._end_message()
                if marker == _START:
                    self._begin_header(names_author=True)
            else:  # none of the format's: the model writes about it
                self._found.append(Piece(self.kind, marker, name=self._name))
        elif marker == _START:
            self._begin_header(names_author=True)
        elif marker == _MESSAGE:
            self._begin_message(*_read_header("".join(self._head), names_author=self._names_author))
        elif marker in _ENDS:
            self._give_up_header()
        else:
            self._in_header = True
            self._head.append(marker)

    def _begin_header(self, *, names_author: bool) -> None:
        self._in_header, self._names_author = names_author, names_author
        self._head, self._bare = [], ""

    def _begin_message(self, kind: Kind, name: str) -> None:
        self._begin_header(names_author=False)
        self.kind, self._name = kind, name
        self._found.append(Piece(kind, "", True, name))

    def _end_message(self) -> None:
        self._last, self.kind = self.kind, None
        self._begin_header(names_author=False)

    def _take_as_content(self, text: str) -> None:
        """Take text that is in no message as content: of the last message, if that is content, too."""
        behind = self._last == "content"
        if behind:
            self._begin_header(names_author=False)
            self.kind, self._name = "content", ""
        else:
            self._begin_message("content", "")
        self._found.append(Piece("content", text, behind=behind))

    def _give_up_header(self) -> None:
        """Drop a header that has no message. If it is longer than any header, it is text, as is space alone."""
        head, first = "".join(self._head), self._last is None
        words = [word for word in _OF_HEADERS.sub(" ", head).split() if not word.startswith(_TO)]
        if len(words) > _MOST_WORDS + self._names_author or (first and head and not self._in_header):
            self._take_as_content(_OF_HEADERS.sub(" ", head).lstrip(" ") if self._in_header else head)
            self._end_message()
        self._begin_header(names_author=False)


class TextJoiner:
    """Puts a separator between the texts of messages."""

    def __init__(self) -> None:
        self._has_text = self._separates = False

    def take(self, piece: Piece) -> str:
        """Return the text of a piece, with a separator if it is the first of a message behind others with text."""
        if piece.begins:
            self._separates = self._has_text
            return ""
        text = SEPARATOR + piece.text if self._separates else piece.text
        self._has_text, self._separates = True, False
        return text


class HarmonyParser:
    """Separates the reasoning from the other messages, which keep their markup for ``HarmonyCallParser``."""

    separator = SEPARATOR
    ended = True  # a call can be forced only by the format's own markup

    def __init__(self, begun: str) -> None:
        self._scanner = MessageScanner(begun)
        self._reasoning = TextJoiner()

    @property
    def reasoning(self) -> bool:
        """Whether the next text is reasoning."""
        return self._scanner.kind == "reasoning"

    @property
    def inside(self) -> bool:
        """Whether the next text is reasoning or markup."""
        return self._scanner.kind not in ("content", "call")

    def push(self, text: str, *, last: bool) -> list[tuple[str, str]]:
        """Return the reasoning, and other text, that have become certain with a piece of the text, in order."""
        found: list[tuple[str, str]] = []
        for piece in self._scanner.push(text, last=last):
            if piece.kind == "reasoning":
                # The end of the message before, so that what is after it does not wait behind the reasoning.
                found.append((self._reasoning.take(piece), _ENDS[0] if piece.begins else ""))
            elif piece.kind != "other":
                # The end of the message, so that text on both sides of it makes no marker.
                text = _ENDS[0] + piece.text if piece.behind else piece.text
                found.append(("", _markup(piece) if piece.begins else text))
        return found


class HarmonyReasoning(NamedTuple):
    """An answer in the format. ``begun`` is its first message as far as the prompt has it."""

    begun: str

    @property
    def is_marked(self) -> bool:
        return True

    def parser(self) -> HarmonyParser:
        return HarmonyParser(self.begun)

    def before(self, form: StructuredOutputs) -> StructuredOutputs:
        """Return a form that is the text of the final message, or of a call if it has a header, behind reasoning."""
        header = form.header
        if not header:
            constrained = f" {_CONSTRAIN}json" if form.kind == "json_schema" else ""  # as vLLM forces it
            header = f"{_CHANNEL}final{constrained}{_MESSAGE}"
        kind, closing = MessageScanner(self.begun).kind, f"{_ENDS[0]}{_ASSISTANT}"
        if kind is None:
            return form._replace(opening=TEMPLATE_MARKER, closing=closing, header=header)
        if kind == "reasoning":
            return form._replace(closing=closing, header=header)
        return form._replace(header=closing + form.header) if form.header else form


def harmony_reasoning(name: str, template: str, prompt: str) -> HarmonyReasoning | None:
    """Return how the answer to a prompt begins; None unless this parser's name or the chat template is the format's."""
    if name == NAME or (name == "auto" and TEMPLATE_MARKER in template):
        return HarmonyReasoning(prompt[max(prompt.rfind(_START), 0) :].removeprefix(_ASSISTANT))
    return None


def content_of(texts: Iterable[str], reasoning: HarmonyReasoning) -> Iterator[str]:
    """Yield the content of an answer, without its reasoning and calls, as its text comes."""
    scanner, content = MessageScanner(reasoning.begun), TextJoiner()
    for text, last in itertools.chain(zip(texts, itertools.repeat(False)), [("", True)]):
        for piece in scanner.push(text, last=last):
            if piece.kind == "content" and (found := content.take(piece)):
                yield found


def forced_calls(schemas: dict[str, object]) -> StructuredOutputs:
    """Return the form of a call of one of these functions. As the model ends its turn with a call, it is one."""
    header = f"{_CHANNEL}commentary {_TO}{_FUNCTIONS}"
    tagged = [[f"{name} {_CONSTRAIN}json{_MESSAGE}", schema] for name, schema in schemas.items()]
    return StructuredOutputs("tagged_json", json.dumps(tagged, ensure_ascii=False), header=header)


def turns(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat as the chat template of gpt-oss takes them.

    It calls reasoning ``thinking``, takes the text beside a call for reasoning, shows one call of a message, and takes
    the results behind it for those of this call.
    """
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if message.get("role") != "assistant":
            yield message
            continue
        turn = {name: value for name, value in message.items() if name not in ("thinking", "tool_calls")}
        calls = message.get("tool_calls")
        calls = calls if isinstance(calls, list) else []
        texts = [message.get("reasoning") or message.get("thinking")]
        if calls and isinstance(message.get("content"), str):
            texts.append(message["content"])
            turn["content"] = ""
        if thinking := "\n".join(text for text in texts if isinstance(text, str) and text):
            turn["thinking"] = thinking
        results: dict[str, list[dict[str, Any]]] = {}
        while len(calls) > 1 and at < len(messages) and messages[at].get("role") == "tool":
            results.setdefault(str(messages[at].get("tool_call_id")), []).append(messages[at])
            at += 1
        for call in calls:
            yield turn | {"tool_calls": [call]}
            turn.pop("thinking", None)
            yield from results.pop(str(call.get("id")) if isinstance(call, Mapping) else "", [])
        if not calls:
            yield turn
        yield from itertools.chain.from_iterable(results.values())


def _markup(piece: Piece) -> str:
    """Return the header of a message."""
    if piece.kind == "call":
        return f"{_ASSISTANT} {_TO}{_FUNCTIONS}{piece.name}{_CHANNEL}commentary{_MESSAGE}"
    return f"{_ASSISTANT}{_CHANNEL}final{_MESSAGE}"


def _read_header(head: str, *, names_author: bool) -> tuple[Kind, str]:
    """Return what a message with this header is, and the name of the function that it calls."""
    author, _, rest = head.partition(_CONSTRAIN)[0].partition(_CHANNEL)
    of_author, of_channel = author.split(), rest.partition(_CHANNEL)[0].split()
    recipient = next((word for word in (*of_author, *of_channel) if word.startswith(_TO)), "").removeprefix(_TO)
    channel = next((word for word in of_channel if not word.startswith(_TO)), "")
    if names_author and of_author and not of_author[0].startswith((_TO, "assistant")):
        return "other", ""
    name = recipient.removeprefix(_FUNCTIONS)
    if name and (recipient != name or name.partition(".")[0] not in _NO_FUNCTIONS):
        return "call", name
    if channel == "analysis":
        return "reasoning", ""
    return ("other" if name and channel != "final" else "content"), ""


def _held_from(text: str, start: int) -> int:
    """Return where the end of a text begins that may be the beginning of a marker."""
    at = text.rfind("<", max(start, len(text) - _LONGEST + 1))
    if at < 0 or not any(marker.startswith(text[at:]) for marker in _MARKERS):
        return len(text)
    return at
