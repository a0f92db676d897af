"""A record of what a client has of a streamed answer, so that another run of the request can continue it.

If the instance that writes a stream is lost, the gateway runs the request again elsewhere, with the same seed and so
with the same tokens. ``Transcript.take`` compares the new events with what the client has, drops that part, and lets
the rest through.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from ..large_json import parse
from .other_events import DivergedError, OtherEvents
from .sse import event

# The texts of a chat's delta, in order. The reasoning has an earlier name in vLLM, and in some versions both.
_TEXTS = (("reasoning", "reasoning_content"), ("content",))
_SILENT = ("role", "refusal", *chain(*_TEXTS))  # fields of a chat's delta that are not compared as other fields
_MOST_PARSED_BYTES = 4 << 20  # of an event of the Responses API: only its last ones are larger
# Of a token each.
_DELTAS = (
    *("response.reasoning_text.delta", "response.output_text.delta", "response.function_call_arguments.delta"),
    "content_block_delta",  # of the Messages API
)


@dataclass
class _Choice:
    """A choice of an answer: what was sent of it, and how much of that the present run has repeated."""

    opened: bool = False
    text: bytearray = field(default_factory=bytearray)  # in UTF-8: a string would be copied for every token
    tokens: array[int] = field(default_factory=lambda: array("q"))  # hashes: eight bytes for each instead of eighty
    others: array[int] = field(default_factory=lambda: array("q"))
    finish_reason: str | None = None
    repeated_text: int = 0
    repeated_tokens: int = 0
    repeated_others: int = 0

    def rewind(self) -> None:
        self.repeated_text = self.repeated_tokens = self.repeated_others = 0


@dataclass
class _Piece:
    """The part that one chunk adds to a choice."""

    text: bytes
    tokens: array[int]
    others: array[int]
    finish_reason: str | None


class Transcript:
    """The record of one streamed answer, over all runs of its request."""

    def __init__(self) -> None:
        self.runs = 0
        self.tokens = 0  # how many were sent
        self._choices: dict[int, _Choice] = {}
        self._head: dict[str, Any] = {}
        self._others = OtherEvents()

    def begin(self) -> None:
        """Note that a run of the request begins."""
        self.runs += 1
        self._others.rewind()
        for choice in self._choices.values():
            choice.rewind()

    def take(self, raw: bytes, data: bytes) -> bytes | None:
        """Return what to send for an event, or None if the client has it already.

        ``raw`` is the whole event and ``data`` its data. Raises DivergedError if the event contradicts what the client
        has, and ValueError if it cannot be read.
        """
        if len(data) > _MOST_PARSED_BYTES and raw.startswith(b"event: response."):
            return self._others.take_unparsed(raw, data)
        chunk = parse(data)
        if not isinstance(chunk, dict):
            raise ValueError("expected an object as an event's data, found something else")  # noqa: TRY004
        if chunk.get("type") == "delta":
            return self._take_frame(raw, chunk)
        if "error" in chunk or chunk.get("type") == "ping":
            return raw
        if chunk.get("choices"):
            return self._take_chunk(raw, chunk)
        sent = self._others.take(raw, data, chunk)
        self.tokens += sent is not None and chunk.get("type") in _DELTAS
        return sent if sent is None or self.runs == 1 or not self._head else event(chunk | self._head)

    def _take_chunk(self, raw: bytes, chunk: dict[str, Any]) -> bytes | None:
        if not self._head:
            self._head = {name: chunk[name] for name in ("id", "created") if name in chunk}
        rest = [cut for choice in chunk["choices"] if (cut := self._new_part(choice)) is not None]
        if self.runs == 1:
            return raw
        return event(chunk | self._head | {"choices": rest}) if rest else None

    def _new_part(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """Return the part of a chunk's choice that the client does not have, or None if it has all of it."""
        record = self._choices.setdefault(int(choice.get("index", 0)), _Choice())
        piece = _piece(choice)
        opening, record.opened = not record.opened, True
        known = self._compare(record, piece)
        if self.runs == 1:
            # A token may have no text: it may be part of a character, or mark the end.
            self.tokens += not (piece.text or piece.tokens or "role" in choice.get("delta", {}))
            return choice
        text, tokens = piece.text[known.text :], piece.tokens[known.tokens :]
        others = piece.others[known.others :]
        if not (text or tokens or others or opening or known.finishes):
            return None
        if known.text == known.tokens == known.others == 0:
            return choice
        return _without_known(choice, known)

    def _take_frame(self, raw: bytes, frame: dict[str, Any]) -> bytes | None:
        """Return what to send for a delta frame between engine and function, which has one sequence and token ids."""
        text, token_ids, logprobs, finish_reason = frame["values"][:4]
        record = self._choices.setdefault(0, _Choice())
        whole = _encoded(text)
        known = self._compare(record, _Piece(whole, _hashes(token_ids), _hashes(()), finish_reason))
        if self.runs == 1:
            return raw
        if known.tokens == len(token_ids) and known.text == len(whole) and not known.finishes:
            return None
        if known.text == known.tokens == 0:
            return raw
        values = [
            _decoded(whole[known.text :]),
            token_ids[known.tokens :],
            logprobs[known.tokens :],
            *frame["values"][3:],
        ]
        return event(frame | {"values": values})

    def _compare(self, record: _Choice, piece: _Piece) -> _Overlap:
        """Compare a piece with what was sent, and record its new part. Raises DivergedError."""
        was_finished = record.finish_reason
        text = _overlap(record.text, record.repeated_text, piece.text)
        tokens = _overlap(record.tokens, record.repeated_tokens, piece.tokens)
        others = _overlap(record.others, record.repeated_others, piece.others)
        new_text, new_tokens = piece.text[text:], piece.tokens[tokens:]
        if was_finished is not None and (new_text or new_tokens or piece.finish_reason not in (None, was_finished)):
            raise DivergedError
        record.text += new_text
        record.tokens += new_tokens
        record.others += piece.others[others:]
        record.repeated_text += len(piece.text)
        record.repeated_tokens += len(piece.tokens)
        record.repeated_others += len(piece.others)
        record.finish_reason = was_finished or piece.finish_reason
        if piece.finish_reason is not None and record.repeated_text < len(record.text):
            raise DivergedError  # the run ended before it repeated everything that was sent
        self.tokens += len(new_tokens) or bool(new_text)
        return _Overlap(text, tokens, others, piece.finish_reason is not None and was_finished is None)


@dataclass(frozen=True, slots=True)
class _Overlap:
    """The part of a piece that the client has already, and whether the piece ends the choice."""

    text: int
    tokens: int
    others: int
    finishes: bool


def _overlap(sent: Any, repeated: int, new: Any) -> int:
    """Return how much of ``new``, which comes after ``repeated`` items, was sent before.

    Raises DivergedError if that part differs from what was sent.
    """
    before = sent[repeated : repeated + len(new)]
    if before != new[: len(before)]:
        raise DivergedError
    return len(before)


def _piece(choice: Mapping[str, Any]) -> _Piece:
    logprobs = choice.get("logprobs")
    tokens: list[str] = []
    others: list[str] = []
    delta = choice.get("delta")
    if isinstance(delta, Mapping):
        text = "".join(text for _, text in _texts(delta))
        others = [_comparable(name, value) for name, value in delta.items() if name not in _SILENT and value]
        if isinstance(logprobs, Mapping):
            tokens = [str(entry.get("token")) for entry in logprobs.get("content") or []]
    else:
        text = choice.get("text") or ""
        if isinstance(logprobs, Mapping):
            tokens = list(map(str, logprobs.get("tokens") or []))
    return _Piece(_encoded(text), _hashes(tokens), _hashes(others), choice.get("finish_reason"))


def _hashes(values: Iterable[object]) -> array[int]:
    return array("q", map(hash, values))


def _comparable(name: str, value: Any) -> str:
    """Return a field of a delta as text, without the ids of tool calls, which differ from run to run."""
    if name == "tool_calls" and isinstance(value, list):
        value = [{key: part for key, part in call.items() if key != "id"} for call in value if isinstance(call, dict)]
    return json.dumps([name, value], sort_keys=True)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "surrogatepass")


def _texts(delta: Mapping[str, Any]) -> Iterator[tuple[list[str], str]]:
    """Yield the texts of a chat's delta, each with the names of its fields."""
    for names in _TEXTS:
        given = [name for name in names if delta.get(name)]
        if given:
            yield given, delta[given[0]]


def _without_known(choice: dict[str, Any], known: _Overlap) -> dict[str, Any]:
    """Return a choice without the text and the log-probabilities of tokens that the client has."""
    logprobs = choice.get("logprobs")
    if isinstance(logprobs, dict):
        logprobs = {
            name: value[known.tokens :] if isinstance(value, list) else value for name, value in logprobs.items()
        }
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return choice | {"text": _decoded(_encoded(choice.get("text") or "")[known.text :]), "logprobs": logprobs}
    cut: dict[str, str] = {}
    left = known.text
    for names, text in _texts(delta):
        whole = _encoded(text)
        cut |= dict.fromkeys(names, _decoded(whole[left:]))
        left = max(left - len(whole), 0)
    return choice | {"delta": delta | cut, "logprobs": logprobs}
