"""The process that keeps an engine's grammars, beside the engine.

To read a vocabulary of 128k tokens holds Python's lock for over a second, in which the engine could make no token for
anybody. And a grammar comes from a client: what it costs in time and memory should not be the engine's.

    hello {error}                                  when the vocabulary is read
    open {number, kind, text, tokens}              → opened {error, warnings}
    step {rows: [[number, tokens]], closed: […]}   → masks {states: [[accepting, stopped, error]]}

Two sockets, one for steps and one for the rest. The masks lie in a shared file, a row for each row of the step.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import threading
from dataclasses import dataclass
from typing import Any

from ..base import StructuredOutputs
from ..frames import Frame, FrameReader, pack
from .grammar import compiled

_MOST_COPIES = 64  # grammars that are kept for further requests


@dataclass(frozen=True)
class Task:
    """The argument of the process: descriptors it inherits, and what the engine knows of the vocabulary."""

    openings: int
    steps: int
    tokenizer: int
    masks: int
    row_bytes: int
    vocab_size: int
    eos_token_ids: list[int]


class Grammars:
    """The running grammars by number."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._matchers: dict[int, Any] = {}
        self._fresh: dict[StructuredOutputs, Any] = {}  # as they are before the first token, the last used last

    def open(self, number: int, asked: StructuredOutputs, tokens: list[int]) -> Frame:
        try:
            matcher = self._matcher(asked)
        except ValueError as error:
            return {"type": "opened", "error": str(error), "warnings": []}
        fault = matcher.get_error()
        if not fault and tokens and not matcher.consume_tokens(tokens):
            fault = matcher.get_error()
        if not fault:
            self._matchers[number] = matcher
        return {"type": "opened", "error": fault, "warnings": [] if fault else matcher.get_grammar_warnings()}

    def _matcher(self, asked: StructuredOutputs) -> Any:
        from llguidance import LLMatcher

        fresh = self._fresh.pop(asked, None)
        if fresh is None:
            fresh = LLMatcher(self._tokenizer, compiled(asked), log_level=0)  # without Python's lock
        if not fresh.is_error():
            self._fresh[asked] = fresh
            while len(self._fresh) > _MOST_COPIES:
                del self._fresh[next(iter(self._fresh))]
        return fresh.deep_copy()

    def step(self, rows: list[tuple[int, list[int]]], masks: memoryview, row_bytes: int) -> list[tuple[Any, ...]]:
        """Take the tokens in, and write the masks of the next ones."""
        states: list[tuple[Any, ...]] = []
        for row, (number, tokens) in enumerate(rows):
            matcher = self._matchers[number]
            if tokens:
                matcher.consume_tokens(tokens)
            if not matcher.is_error():
                mask = matcher.compute_bitmask()[:row_bytes]
                masks[row * row_bytes : row * row_bytes + len(mask)] = mask
            states.append((matcher.is_accepting(), matcher.is_stopped(), matcher.get_error()))
        return states

    def close(self, number: int) -> None:
        self._matchers.pop(number, None)


def main() -> None:
    task = Task(**json.loads(sys.argv[1]))
    openings, steps = socket.socket(fileno=task.openings), socket.socket(fileno=task.steps)
    with open(task.tokenizer, "rb") as file:
        text = file.read().decode()
    try:
        grammars = Grammars(_vocabulary(text, task))
    except Exception as error:  # noqa: BLE001 - whatever the library makes of a tokenizer
        openings.sendall(pack({"type": "hello", "error": str(error) or type(error).__name__}))
        steps.recv(1)  # until the engine is gone
        return
    del text
    openings.sendall(pack({"type": "hello", "error": ""}))
    threading.Thread(target=_open, args=(openings, grammars), daemon=True).start()
    _step(steps, grammars, memoryview(mmap.mmap(task.masks, 0)), task.row_bytes)
    os._exit(0)  # the engine is gone; nobody waits for an opening


def _vocabulary(text: str, task: Task) -> Any:
    """The tokens of a tokenizer.json. A model may have rows for more than these, or for fewer."""
    from llguidance import LLTokenizer

    eos = task.eos_token_ids or None
    try:
        return LLTokenizer(text, n_vocab=task.vocab_size, eos_token=eos)
    except ValueError:
        return LLTokenizer(text, eos_token=eos)


def _open(connection: socket.socket, grammars: Grammars) -> None:
    reader = FrameReader(connection)
    while (frame := reader.read()) is not None:
        asked = StructuredOutputs(frame["kind"], frame["text"])
        connection.sendall(pack(grammars.open(frame["number"], asked, frame["tokens"])))


def _step(connection: socket.socket, grammars: Grammars, masks: memoryview, row_bytes: int) -> None:
    reader = FrameReader(connection)
    while (frame := reader.read()) is not None:
        for number in frame["closed"]:
            grammars.close(number)
        states = grammars.step(frame["rows"], masks, row_bytes)
        connection.sendall(pack({"type": "masks", "states": states}))


if __name__ == "__main__":
    main()
