"""The process that keeps an engine's grammars.

It is not the engine's process, because reading a vocabulary of 128k tokens holds Python's global lock for over a
second, during which the engine could make no tokens. Also, grammars come from clients, and should not take the engine's
time and memory.

    hello {error}                                  sent once the vocabulary is read
    open {number, form}                            → opened {error, warnings}, or slow {}
    step {rows: [[number, tokens, end_token_ids]], closed: […]} → masks {states: [[stopped, error]]}

There are three sockets: one for steps, one on which grammars are opened, and one for those that took too long there,
so that they hold up only each other. The masks are written to a shared file, one for each row of
the step. ``end_token_ids`` are the tokens that end the row's sequence; they are sent once, and allowed whenever the
grammar is satisfied.
"""

from __future__ import annotations

import hashlib
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
from .grammar import compile_grammar
from .trial import CPU_S, try_grammar

_MOST_COPIES = 64  # compiled grammars that are kept for later requests
_MOST_COPIES_BYTES = 256 << 20
_MOST_REFUSALS = 1024  # refused grammars that are remembered; each takes 2 KB at most
_QUICK_CPU_S = 0.1  # what a trial may take while all others wait; usual schemas take one to two milliseconds
_REFUSED_S = 600.0  # how long: what took too long on a busy machine may be tried again after this time
_STEP_CPU_S = 1.0  # limit for one grammar in a step, since the next tokens of all sequences wait for it
_MOST_ITEMS = 10_000  # limit of the parser's items in a step: a fifth of the library's default
_STACK_BYTES = 256 << 20  # addresses only: the library recurses as deep as a grammar is nested


@dataclass(frozen=True)
class Task:
    """The argument of the process: the numbers of the descriptors that it inherits, and facts about the vocabulary.

    ``step_event`` is an eventfd that wakes the process for a step, ``masks`` the shared file with ``row_bytes`` for
    each row.
    """

    openings: int
    slow_openings: int
    steps: int
    step_event: int
    tokenizer: int
    masks: int
    row_bytes: int
    vocab_size: int
    eos_token_ids: list[int]


class _SlowGrammar(Exception):
    """A trial took more time than it had, and may be given more."""


class Grammars:
    """The grammars of running sequences, by number."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._matchers: dict[int, Any] = {}
        self._end_token_ids: dict[int, list[int]] = {}
        # By digest, the most recently used last: matchers in their state before the first token, with their sizes in
        # bytes, and refusals, with the time of each. Refusals have a limit of their own, so that they evict no matcher.
        self._fresh: dict[bytes, tuple[Any, int]] = {}
        self._refused: dict[bytes, tuple[str, float]] = {}
        self._lock = threading.Lock()

    def open(self, number: int, form: StructuredOutputs, cpu_s: float = CPU_S) -> Frame:
        """Open a grammar. The answer is a ``slow`` frame if that takes more than ``cpu_s``, and less than the limit."""
        try:
            matcher = self._matcher(form, cpu_s)
        except _SlowGrammar:
            return {"type": "slow"}
        except ValueError as error:
            return {"type": "opened", "error": str(error) or "it cannot be read", "warnings": []}
        fault = matcher.get_error()
        warnings = [] if fault else matcher.get_grammar_warnings()
        if not fault and not warnings:  # with either, the engine refuses the request, and never closes the number
            self._matchers[number] = matcher
        return {"type": "opened", "error": fault, "warnings": warnings}

    def _matcher(self, form: StructuredOutputs, cpu_s: float) -> Any:
        """Return a fresh matcher for a grammar. Raises ValueError if it is not valid, or too slow or large."""
        digest = hashlib.sha256(json.dumps(form).encode()).digest()
        with self._lock:
            found = self._fresh.pop(digest, None)
            if found is None:
                self._raise_if_refused(digest)
        if found is None:
            trial = try_grammar(lambda: self._compile(form), cpu_s)
            if trial.slow and cpu_s < CPU_S:
                raise _SlowGrammar
            if trial.fault:
                if trial.final:
                    self._refuse(digest, trial.fault)
                raise ValueError(trial.fault)
            found = self._compile(form), trial.size_bytes
        if not found[0].is_error():
            self._keep(digest, found)
        return found[0].deep_copy()

    def _keep(self, digest: bytes, found: tuple[Any, int]) -> None:
        with self._lock:
            self._fresh[digest] = found
            while len(self._fresh) > 1 and (
                len(self._fresh) > _MOST_COPIES or sum(size for _, size in self._fresh.values()) > _MOST_COPIES_BYTES
            ):
                del self._fresh[next(iter(self._fresh))]

    def _refuse(self, digest: bytes, fault: str) -> None:
        with self._lock:
            self._refused[digest] = fault, time.monotonic()
            if len(self._refused) > _MOST_REFUSALS:
                del self._refused[next(iter(self._refused))]

    def _raise_if_refused(self, digest: bytes) -> None:
        """Raise ValueError if a grammar has been refused before: a trial takes up to three seconds of others' time."""
        fault, at = self._refused.pop(digest, ("", 0.0))
        if fault and time.monotonic() - at < _REFUSED_S:
            self._refused[digest] = fault, at
            raise ValueError(fault)

    def _compile(self, form: StructuredOutputs) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(step_max_items=_MOST_ITEMS, verbose_errors=False)
        grammar = compile_grammar(form, self._tokenizer)
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)  # releases Python's lock

    def step(
        self, rows: list[tuple[int, list[int], list[int]]], masks: memoryview, row_bytes: int
    ) -> list[tuple[bool, str]]:
        """Consume each row's new tokens, and write the masks for the tokens after them.

        Returns for each row whether its grammar allows no further token, and its error, or "".
        """
        states = []
        for row, (number, tokens, end_token_ids) in enumerate(rows):
            matcher = self._matchers[number]
            if end_token_ids:
                self._end_token_ids[number] = end_token_ids
            began = time.thread_time()
            if tokens:
                matcher.consume_tokens(tokens)
            if not matcher.is_error():
                mask = matcher.compute_bitmask()[:row_bytes]
                first = row * row_bytes
                masks[first : first + len(mask)] = mask
                accepting = matcher.is_accepting()
                for token in self._end_token_ids.get(number, ()):
                    place, bit = first + token // 8, 1 << token % 8
                    if token < 8 * row_bytes:
                        masks[place] = masks[place] | bit if accepting else masks[place] & ~bit
            too_slow = time.thread_time() - began > _STEP_CPU_S
            fault = (
                f"it took more than {_STEP_CPU_S:g} s to find what may come next" if too_slow else matcher.get_error()
            )
            states.append((matcher.is_stopped(), fault))
        return states

    def close(self, number: int) -> None:
        self._matchers.pop(number, None)
        self._end_token_ids.pop(number, None)


def main() -> None:
    end_first()
    task = Task(**json.loads(sys.argv[1]))
    numbers = (task.openings, task.slow_openings, task.steps)
    openings, slow_openings, steps = (socket.socket(fileno=number) for number in numbers)
    with open(task.tokenizer, "rb") as file:
        text = file.read().decode()
    try:
        grammars = Grammars(_vocabulary(text, task))
    except Exception as error:  # noqa: BLE001 - whatever the library makes of a tokenizer
        openings.sendall(pack({"type": "hello", "error": str(error) or type(error).__name__}))
        steps.recv(1)  # returns when the engine is gone
        return
    del text
    openings.sendall(pack({"type": "hello", "error": ""}))
    threading.stack_size(_STACK_BYTES)
    masks = memoryview(mmap.mmap(task.masks, 0))
    stepping = threading.Thread(target=_step, args=(steps, task.step_event, grammars, masks, task.row_bytes))
    for lane in ((openings, grammars, _QUICK_CPU_S), (slow_openings, grammars, CPU_S)):
        threading.Thread(target=_open, args=lane, daemon=True).start()
    stepping.start()
    stepping.join()
    os._exit(0)  # the engine is gone, so a grammar that is being opened is not needed


def _vocabulary(text: str, task: Task) -> Any:
    """Read the vocabulary of a tokenizer.json, with the model's size and EOS tokens where they fit it.

    A model may have more or fewer rows than the tokenizer has tokens, and EOS tokens that the tokenizer does not have.
    """
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


def _open(connection: socket.socket, grammars: Grammars, cpu_s: float) -> None:
    reader = FrameReader(connection)
    while (frame := reader.read()) is not None:
        form = StructuredOutputs(*frame["form"])
        connection.sendall(pack(grammars.open(frame["number"], form, cpu_s)))


def _step(connection: socket.socket, step_event: int, grammars: Grammars, masks: memoryview, row_bytes: int) -> None:
    """Answer steps until the engine is gone. The eventfd ``step_event`` says that a step has been sent.

    Polling the socket instead would slow the engine: a message on a socket wakes its receiver on the sender's core,
    where it often runs in the sender's place.
    """
    reader = FrameReader(connection)
    poll = select.poll()
    poll.register(step_event, select.POLLIN)
    poll.register(connection, 0)  # reports only that the engine has closed it
    while poll.poll()[0][0] == step_event:
        os.eventfd_read(step_event)
        frame = reader.read()
        if frame is None:
            return
        for number in frame["closed"]:
            grammars.close(number)
        states = grammars.step(frame["rows"], masks, row_bytes)
        connection.sendall(pack({"type": "masks", "states": states}))


if __name__ == "__main__":
    main()
