"""Makes the text of sequences with structured outputs follow their grammars, by masking the logits of each step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...errors import EngineError, RequestError
from ..base import StructuredOutputs
from ..serving.sequence import SampledToken, Span
from ..serving.sequence import Sequence as Generated
from .constraint import Constraint
from .grammar import PARAM

if TYPE_CHECKING:
    from .process import GrammarProcess

logger = logging.getLogger(__name__)


class EndedSequence(NamedTuple):
    """A sequence that its grammar ends: its text is complete (``error`` is None), or there was an error."""

    sequence: Generated
    error: EngineError | None


class _PendingMasks(NamedTuple):
    """Masks that have been requested from a process, for these sequences, and not received yet."""

    process: GrammarProcess
    rows: list[Generated]


class _Masks(NamedTuple):
    """The masks and states that the process has returned.

    ``places``: the ``id()`` of a sequence → its row. ``bits`` uint8 [sequences, bytes]: a bit for each token, set if it
    may come next. ``states``: (stopped, error) of each grammar.
    """

    places: dict[int, int]
    bits: Tensor
    states: list[tuple[bool, str]]


class Constraints:
    """The grammars of one engine. The process that keeps them is started by the first request with a grammar."""

    def __init__(
        self, read_tokenizer: Callable[[], bytes | None], *, vocab_size: int, eos_token_ids: tuple[int, ...], rows: int
    ) -> None:
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(token for token in eos_token_ids if token < vocab_size)
        self._rows = rows
        self._process: GrammarProcess | None = None
        self._starting = threading.Lock()
        self._ended = False
        self._pending: _PendingMasks | None = None
        self._bytes: Tensor | None = None

    def open(self, form: StructuredOutputs, wanted: Callable[[], bool]) -> Constraint:
        """Open a grammar for a new sequence. The first call waits until the vocabulary has been read.

        ``wanted`` says whether the request still needs it: others may come first. Call it in any thread except the
        engine's. Raises RequestError if the grammar is not valid or the library is not
        installed, and EngineError.
        """
        process = self._started()
        return Constraint(process, process.open(form, wanted))

    def add_tokens(
        self, sequences: Sequence[Generated], sampled: Sequence[SampledToken], *, request_next: bool
    ) -> None:
        """Note the sampled tokens.

        With ``request_next``, request the next masks now, so that they are made between steps.
        """
        going = []
        for sequence, each in zip(sequences, sampled, strict=True):
            if sequence.constraint is not None and not sequence.cancelled:
                sequence.constraint.unsent.append(each.token)
                going.append(sequence)
        if request_next:
            self._send(going)

    def check(self, form: StructuredOutputs, wanted: Callable[[], bool] = lambda: True) -> str:
        """Return what is wrong with a grammar, or "". This is for engines that make their masks themselves.

        Raises RequestError and EngineError like ``open``.
        """
        return self._started().check(form, wanted)

    def request_masks(self, spans: Sequence[Span]) -> None:
        """Request the masks that a step will need, unless they have been requested. They are made while it runs."""
        wanted = [
            span.sequence
            for span in spans
            if span.sequence.constraint is not None and span.stop == len(span.sequence.tokens)
        ]
        if self._pending is not None:
            requested = {id(sequence) for sequence in self._pending.rows}
            if all(id(sequence) in requested for sequence in wanted):
                return
        self._send(wanted)

    def apply(self, logits: Tensor, sequences: Sequence[Generated]) -> list[EndedSequence]:
        """Mask the tokens that the grammars do not allow, in place. Returns the sequences that get no further token.

        ``logits`` [sequences, vocab] has a row for each of ``sequences``.
        """
        rows = {row: each for row, each in enumerate(sequences) if each.params.structured_outputs is not None}
        if not rows:
            return []
        ended, missing = self._mask(logits, rows)
        if missing:
            self._send(list(missing.values()))
            found, lost = self._mask(logits, missing)
            text = "the process that keeps the grammars of structured outputs ended; try again"
            ended += found
            ended += [EndedSequence(each, EngineError(text)) for each in lost.values()]
        return ended

    def _send(self, sequences: list[Generated]) -> None:
        process = self._process
        if process is None or process.failed:
            return
        messages, rows = [], []
        for sequence in sequences:
            constraint = sequence.constraint
            if constraint is not None and constraint.process is process:
                rows.append(sequence)
                end_token_ids = [] if constraint.end_token_ids_sent else sorted(sequence.end_token_ids)
                messages.append((constraint.number, constraint.unsent, end_token_ids))
                constraint.unsent, constraint.end_token_ids_sent = [], True
        if not rows:
            return
        if self._pending is not None:  # they were for other sequences, or a step failed before it received them
            self._receive()
        try:
            process.send(messages)
        except EngineError as error:
            logger.warning("%s", error)
        else:
            self._pending = _PendingMasks(process, rows)

    def _mask(self, logits: Tensor, rows: dict[int, Generated]) -> tuple[list[EndedSequence], dict[int, Generated]]:
        """Mask the rows whose masks were requested. Returns sequences that end, and the rows without a mask."""
        masks, ended, missing = self._receive(), [], {}
        places: dict[int, int] = {}
        for row, sequence in rows.items():
            place = None if masks is None else masks.places.get(id(sequence))
            if masks is None or place is None:
                missing[row] = sequence
                continue
            stopped, fault = masks.states[place]
            if fault:
                # The request's fault: a grammar that is too large or ambiguous would fail again.
                text = f"{PARAM}: this grammar could not be followed any further: {' '.join(fault.split())}"
                ended.append(EndedSequence(sequence, RequestError(text, PARAM)))
            elif stopped and not sequence.end_token_ids:
                ended.append(EndedSequence(sequence, None))
            else:
                places[row] = place
        if masks is not None and places:
            logits.masked_fill_(self._forbidden_tokens(masks, places, logits), float("-inf"))
        return ended, missing

    def close(self) -> None:
        with self._starting:
            self._ended = True
            process, self._process = self._process, None
        if process is not None:
            process.close()

    def _started(self) -> GrammarProcess:
        with self._starting:
            if self._ended:
                raise EngineError("the engine is stopping; try again")
            if self._process is None or self._process.failed:
                from importlib.util import find_spec

                from .process import GrammarProcess  # imports subprocess, for which no first token should wait

                if find_spec("llguidance") is None:
                    raise RequestError(
                        f"{PARAM}: expected the package llguidance on this server, which is not installed; "
                        "pip install 'medusa-runtime[structured]'",
                        PARAM,
                    )
                tokenizer = self._read_tokenizer()
                if tokenizer is None:
                    raise RequestError(
                        f"{PARAM}: this checkpoint has no tokenizer.json, so its tokens have no text",
                        PARAM,
                    )
                self._process = GrammarProcess(
                    tokenizer, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids, rows=self._rows
                )
            return self._process

    def _receive(self) -> _Masks | None:
        """Receive the masks that were requested last; None if none were, or the process is gone."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        process, rows = pending
        try:
            states = process.receive()
        except EngineError as error:
            logger.warning("%s", error)
            return None
        bits = torch.frombuffer(process.masks, dtype=torch.uint8, count=len(rows) * process.row_bytes)
        places = {id(sequence): place for place, sequence in enumerate(rows)}
        return _Masks(places, bits.view(len(rows), -1), states)

    def _forbidden_tokens(self, masks: _Masks, places: dict[int, int], logits: Tensor) -> Tensor:
        """Return which tokens must not come next, bool [rows of the logits, vocab].

        ``places``: row of the logits → row of the masks. Other rows of the logits have no forbidden tokens.
        """
        if self._bytes is None:
            # For each byte of bits, its eight booleans packed into one int64, so that one lookup decodes eight tokens.
            bits = torch.tensor([[not byte >> bit & 1 for bit in range(8)] for byte in range(256)], dtype=torch.bool)
            self._bytes = bits.view(torch.int64).view(-1)
        chosen = list(places.values())
        bits = masks.bits if chosen == list(range(len(masks.bits))) else masks.bits[torch.tensor(chosen)]
        looked_up = self._bytes.index_select(0, bits.reshape(-1).int())
        vocab_size = logits.shape[1]
        forbidden = looked_up.view(torch.bool).view(len(chosen), -1)[:, :vocab_size]
        if len(chosen) < len(logits):
            of_all = torch.zeros(len(logits), vocab_size, dtype=torch.bool)
            of_all[torch.tensor(list(places))] = forbidden
            forbidden = of_all
        return forbidden.to(logits.device)
