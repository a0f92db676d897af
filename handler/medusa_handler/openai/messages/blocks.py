"""The blocks of a message in Anthropic's form, and the events that report them to a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from medusa_runtime.engine.base import TokenLogprob

from ...contract import load_json
from ..output import Event

_SIGNATURE = "unsigned"  # clients want one, and send it back; nothing here checks it


class Blocks:
    """Makes the blocks of one message. ``last_call`` is the last of a tool, if there is any."""

    def __init__(self) -> None:
        self.last_call: _ToolUse | None = None

    def reasoning(self, index: int) -> _Thinking:
        return _Thinking(index, {"type": "thinking", "thinking": "", "signature": ""}, "thinking", "thinking_delta")

    def message(self, index: int) -> _Block:
        return _Block(index, {"type": "text", "text": ""}, "text", "text_delta")

    def call(self, index: int, call_id: str, name: str) -> _ToolUse:
        block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        self.last_call = _ToolUse(index, block, "partial_json", "input_json_delta")
        return self.last_call


class _Block:
    """A block whose text grows. ``field`` has it in the deltas of type ``delta``."""

    def __init__(self, index: int, block: dict[str, Any], field: str, delta: str) -> None:
        self.item = block
        self._index = index
        self._field = field
        self._delta = delta
        self._texts: list[str] = []

    def begin(self) -> Iterator[Event]:
        yield {"type": "content_block_start", "index": self._index, "content_block": dict(self.item)}

    def add(self, text: str, tokens: Sequence[TokenLogprob] = ()) -> Event:
        self._texts.append(text)
        return self._event({"type": self._delta, self._field: text})

    def end(self, status: str) -> Iterator[Event]:
        self.item[self._field] = "".join(self._texts)
        yield {"type": "content_block_stop", "index": self._index}

    def _event(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


class _Thinking(_Block):
    def end(self, status: str) -> Iterator[Event]:
        self.item["signature"] = _SIGNATURE
        yield self._event({"type": "signature_delta", "signature": _SIGNATURE})
        yield from super().end(status)


class _ToolUse(_Block):
    """A call of a tool. Its ``input`` stays empty where the arguments are cut off, or are no object."""

    is_whole = False

    def end(self, status: str) -> Iterator[Event]:
        try:
            found = load_json("".join(self._texts))
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict):
            self.is_whole = True
            self.item["input"] = found
        yield {"type": "content_block_stop", "index": self._index}
