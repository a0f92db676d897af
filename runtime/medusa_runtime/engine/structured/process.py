"""The engine's side of the process that keeps its grammars."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack
from itertools import count
from typing import TYPE_CHECKING

from ...errors import EngineError, MedusaError, RequestError
from ...process import hang_up
from ...process_limits import as_limit_error
from ..base import StructuredOutputs
from ..frames import Frame, FrameReader, pack
from .grammar import PARAM
from .worker import Task

if TYPE_CHECKING:
    from collections.abc import Callable

_START_S = 60.0  # for imports and the vocabulary, which take a second or two on an idle machine
_OPEN_S, _SLOW_OPEN_S = 30.0, 120.0  # a slow grammar is computed twice, on cores that may be busy
_STEP_S = 30.0
_END_S = 5.0
_ONE = (1).to_bytes(8, sys.byteorder)  # what is written to an eventfd to add 1
_NOT_KEPT = 0  # the number of grammars that are only checked; each replaces the one before


class _Lane:
    """A socket on which one grammar at a time is opened."""

    def __init__(self, connection: socket.socket, timeout_s: float) -> None:
        self.connection = connection
        self.timeout_s = timeout_s
        self.reader = FrameReader(connection)
        self.lock = threading.Lock()


class GrammarProcess:
    """A process that keeps grammars. Any thread may open grammars; only the engine's thread requests masks.

    ``closed`` collects the numbers of grammars that are no longer needed, and the next ``send`` passes them on.
    ``failed`` is True once the process is gone.
    """

    def __init__(self, tokenizer: bytes, *, vocab_size: int, eos_token_ids: tuple[int, ...], rows: int) -> None:
        """Start the process. It reads the vocabulary in the background, and ``open`` waits for that.

        ``tokenizer``: the content of tokenizer.json. ``rows``: the most grammars in a step. Raises EngineError.
        """
        self.row_bytes = -(-vocab_size // 32) * 4
        self.failed = False
        self.closed: list[int] = []
        with ExitStack() as started:  # closes everything if a part of the start fails
            try:
                self._start(started, tokenizer, rows, vocab_size, eos_token_ids)
            except OSError as error:
                reason = as_limit_error(error) or error
                raise EngineError(f"no process for structured outputs could be started: {reason}") from error
            started.pop_all()
        self._quick, self._slow = _Lane(self._openings, _OPEN_S), _Lane(self._slow_openings, _SLOW_OPEN_S)
        self._read_masks = FrameReader(self._steps)
        self._hello_received = False
        self._fault = ""
        self._numbers = count(1)

    def _start(
        self, started: ExitStack, tokenizer: bytes, rows: int, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> None:
        """Start the process. What this process keeps is put on ``started``. Raises OSError."""
        self._step_event = started.enter_context(open(os.eventfd(0, os.EFD_CLOEXEC), "wb", buffering=0))  # noqa: SIM115
        with ExitStack() as passed:  # what only the other process keeps
            self._openings, theirs = map(started.enter_context, socket.socketpair())
            passed.enter_context(theirs)
            self._slow_openings, slow_theirs = map(started.enter_context, socket.socketpair())
            passed.enter_context(slow_theirs)
            self._steps, their_steps = map(started.enter_context, socket.socketpair())
            passed.enter_context(their_steps)
            masks = os.memfd_create("medusa-masks", os.MFD_CLOEXEC)
            passed.callback(os.close, masks)
            vocabulary = os.memfd_create("medusa-vocabulary", os.MFD_CLOEXEC)
            passed.callback(os.close, vocabulary)
            os.truncate(masks, rows * self.row_bytes)
            with open(os.dup(vocabulary), "wb") as file:
                file.write(tokenizer)
            os.lseek(vocabulary, 0, os.SEEK_SET)
            self.masks = started.enter_context(mmap.mmap(masks, 0))
            sockets = (theirs.fileno(), slow_theirs.fileno(), their_steps.fileno())
            inherited = (*sockets, self._step_event.fileno(), vocabulary, masks)
            task = Task(*inherited, self.row_bytes, vocab_size, list(eos_token_ids))
            command = [sys.executable, "-P", "-m", "medusa_runtime.engine.structured.worker"]
            self._process = subprocess.Popen(
                [*command, json.dumps(dataclasses.asdict(task))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=inherited,
                process_group=0,  # Ctrl-C in a terminal is for the supervisor
            )

    def open(self, form: StructuredOutputs, wanted: Callable[[], bool]) -> int:
        """Open a new grammar, and return its number. Raises RequestError if it is not valid, and EngineError.

        ``wanted`` says, once it is this grammar's turn, whether the request still needs it.
        """
        number = next(self._numbers)
        answer = self._open(form, number, wanted)
        fault = answer["error"] or "; ".join(answer["warnings"])
        if fault:
            raise RequestError(f"{PARAM}: this {form.kind} cannot be used: {' '.join(fault.split())}", PARAM)
        return number

    def check(self, form: StructuredOutputs, wanted: Callable[[], bool]) -> str:
        """Return what is wrong with a grammar, or "". The grammar is not kept for steps."""
        return str(self._open(form, _NOT_KEPT, wanted)["error"])

    def _open(self, form: StructuredOutputs, number: int, wanted: Callable[[], bool]) -> Frame:
        frame = {"type": "open", "number": number, "form": form}
        with self._quick.lock:
            if not self._hello_received:
                self._openings.settimeout(_START_S)
                self._fault = self._ask(self._openings, self._quick.reader, None)["error"]
                self._hello_received = True
            if self._fault:
                raise RequestError(
                    f"{PARAM}: expected a tokenizer whose tokens have a text each, found another: {self._fault}",
                    PARAM,
                )
            answer = self._open_in(self._quick, frame, wanted)
        if answer["type"] == "slow":
            with self._slow.lock:
                answer = self._open_in(self._slow, frame, wanted)
        return answer

    def _open_in(self, lane: _Lane, frame: Frame, wanted: Callable[[], bool]) -> Frame:
        if not wanted():
            raise EngineError("the request has been cancelled")
        lane.connection.settimeout(lane.timeout_s)
        return self._ask(lane.connection, lane.reader, frame)

    def send(self, rows: list[tuple[int, list[int], list[int]]]) -> None:
        """Request masks for the rows of a step. ``receive`` returns once they are made.

        A row is a grammar's number, the tokens since its last row, and the tokens that end its sequence (sent once).
        """
        closed, self.closed = self.closed, []
        try:
            self._steps.settimeout(_STEP_S)
            self._steps.sendall(pack({"type": "step", "rows": rows, "closed": closed}))
            self._step_event.write(_ONE)
        except (OSError, ValueError) as error:  # ValueError: another thread has closed the file
            raise self._fail(error) from error

    def receive(self) -> list[tuple[bool, str]]:
        """Wait for the masks that ``send`` requested, and return the state of each row's grammar: (stopped, error)."""
        states: list[tuple[bool, str]] = self._ask(self._steps, self._read_masks, None)["states"]
        return states

    def close(self) -> None:
        self.failed = True
        for connection in (self._openings, self._slow_openings, self._steps):
            hang_up(connection)
            connection.close()
        self._step_event.close()
        self._process.kill()
        self._process.wait(_END_S)

    def _ask(self, connection: socket.socket, reader: FrameReader, frame: Frame | None) -> Frame:
        """Send a frame, if any, and return the next frame that arrives."""
        try:
            if frame is not None:
                connection.sendall(pack(frame))
            answer = reader.read()
        except (OSError, MedusaError) as error:
            raise self._fail(error) from error
        if answer is None:
            raise self._fail(None)
        return answer

    def _fail(self, error: Exception | None) -> EngineError:
        """End the process, and return the error that says so."""
        if not self.failed:
            self.close()
        why = "took too long" if isinstance(error, TimeoutError) else "ended"
        return EngineError(f"the process that keeps the grammars of structured outputs {why}; try again")
