"""The process that keeps an engine's grammars, beside the engine.

To read a vocabulary of 128k tokens holds Python's lock for over a second, in which the engine could make no token for
anybody. And a grammar comes from a client: what it costs in time and memory should not be the engine's.

    hello {error}                                  when the vocabulary is read
    open {number, kind, text}                      → opened {error, warnings}
    step {rows: [[number, tokens, endings]], closed: […]} → masks {states: [[stopped, error]]}

Two sockets, one for steps and one for the rest. The masks lie in a shared file, a row for each row of the step. What
ends a sequence (``endings``, told once) may come when its grammar is satisfied.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

from ...process import end_first
from ..base import StructuredOutputs
from ..frames import Frame, FrameReader, pack
from .grammar import compiled
from .trial import attempt

_MOST_COPIES = 64  # grammars that are kept for further requests
_MOST_COPIES_BYTES = 256 << 20
_STEP_CPU_S = 1.0  # in which everybody's next token waits
_MOST_ITEMS = 10_000  # of the parser, in a step: a fifth of the library's default
_STACK_BYTES = 256 << 20  # of addresses: the library calls itself as deep as a grammar is nested


@dataclass(frozen=True)
class Task:
    """The argument of the process: descriptors it inherits, and what the engine knows of the vocabulary."""

    openings: int
    steps: int
    asked: int
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
        self._endings: dict[int, list[int]] = {}
        # As they are before the first token, with their size; the last used last.
        self._fresh: dict[StructuredOutputs, tuple[Any, int]] = {}

    def open(self, number: int, asked: StructuredOutputs) -> Frame:
        try:
            matcher = self._matcher(asked)
        except ValueError as error:
            return {"type": "opened", "error": str(error) or "it cannot be read", "warnings": []}
        fault = matcher.get_error()
        if not fault:
            self._matchers[number] = matcher
        return {"type": "opened", "error": fault, "warnings": [] if fault else matcher.get_grammar_warnings()}

    def _matcher(self, asked: StructuredOutputs) -> Any:
        """Raises ValueError for what is no grammar, or takes too much."""
        found = self._fresh.pop(asked, None)
        if found is None:
            trial = attempt(lambda: self._made(asked))
            if trial.fault:
                raise ValueError(trial.fault)
            found = self._made(asked), trial.size_bytes
        if not found[0].is_error():
            self._fresh[asked] = found
            while len(self._fresh) > 1 and (
                len(self._fresh) > _MOST_COPIES or sum(size for _, size in self._fresh.values()) > _MOST_COPIES_BYTES
            ):
                del self._fresh[next(iter(self._fresh))]
        return found[0].deep_copy()

    def _made(self, asked: StructuredOutputs) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(step_max_items=_MOST_ITEMS, verbose_errors=False)
        return LLMatcher(self._tokenizer, compiled(asked), log_level=0, limits=limits)  # without Python's lock

    def step(
        self, rows: list[tuple[int, list[int], list[int]]], masks: memoryview, row_bytes: int
    ) -> list[tuple[bool, str]]:
        """Take the tokens in, and write the masks of the next ones."""
        states = []
        for row, (number, tokens, endings) in enumerate(rows):
            matcher = self._matchers[number]
            if endings:
                self._endings[number] = endings
            began = time.thread_time()
            if tokens:
                matcher.consume_tokens(tokens)
            if not matcher.is_error():
                mask = matcher.compute_bitmask()[:row_bytes]
                first = row * row_bytes
                masks[first : first + len(mask)] = mask
                accepting = matcher.is_accepting()
                for token in self._endings.get(number, ()):
                    place, bit = first + token // 8, 1 << token % 8
                    if token < 8 * row_bytes:
                        masks[place] = masks[place] | bit if accepting else masks[place] & ~bit
            late = time.thread_time() - began > _STEP_CPU_S
            fault = f"it took more than {_STEP_CPU_S:g} s to find what may come next" if late else matcher.get_error()
            states.append((matcher.is_stopped(), fault))
        return states

    def close(self, number: int) -> None:
        self._matchers.pop(number, None)
        self._endings.pop(number, None)


def main() -> None:
    end_first()
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
    threading.stack_size(_STACK_BYTES)
    masks = memoryview(mmap.mmap(task.masks, 0))
    stepping = threading.Thread(target=_step, args=(steps, task.asked, grammars, masks, task.row_bytes))
    threading.Thread(target=_open, args=(openings, grammars), daemon=True).start()
    stepping.start()
    stepping.join()
    os._exit(0)  # the engine is gone; nobody waits for an opening


def _vocabulary(text: str, task: Task) -> Any:
    """The tokens of a tokenizer.json. A model may have rows for more than these or fewer, and end with one of them."""
    from llguidance import LLTokenizer

    eos = task.eos_token_ids
    try:
        return LLTokenizer(text, n_vocab=task.vocab_size, eos_token=eos or None)
    except ValueError:
        known = LLTokenizer(text).vocab_size
        eos = [token for token in eos if token < known]
    try:
        return LLTokenizer(text, n_vocab=task.vocab_size, eos_token=eos or None)
    except ValueError:
        return LLTokenizer(text, eos_token=eos or None)


def _open(connection: socket.socket, grammars: Grammars) -> None:
    reader = FrameReader(connection)
    while (frame := reader.read()) is not None:
        asked = StructuredOutputs(frame["kind"], frame["text"])
        connection.sendall(pack(grammars.open(frame["number"], asked)))


def _step(connection: socket.socket, asked: int, grammars: Grammars, masks: memoryview, row_bytes: int) -> None:
    """Answer steps, for which it is woken by an event.

    A message on a socket wakes its receiver on the sender's core, in whose place it often runs: the engine would wait.
    """
    reader = FrameReader(connection)
    poll = select.poll()
    poll.register(asked, select.POLLIN)
    poll.register(connection, 0)  # its end
    while poll.poll()[0][0] == asked:
        os.eventfd_read(asked)
        frame = reader.read()
        if frame is None:
            return
        for number in frame["closed"]:
            grammars.close(number)
        states = grammars.step(frame["rows"], masks, row_bytes)
        connection.sendall(pack({"type": "masks", "states": states}))


if __name__ == "__main__":
    main()
