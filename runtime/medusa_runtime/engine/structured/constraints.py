"""The sequences whose text must have a form: their grammars, and the masks on the logits of a step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...errors import EngineError, RequestError
from ..base import StructuredOutputs
from ..serving.sequence import Constraint, Span
from ..serving.sequence import Sequence as Generated

if TYPE_CHECKING:
    from .process import GrammarProcess

logger = logging.getLogger(__name__)

PARAM = "structured_outputs"


class Ended(NamedTuple):
    """A sequence that goes no further: with its text whole, or with an error."""

    sequence: Generated
    error: EngineError | None


class _Awaited(NamedTuple):
    """Masks that were asked for: of whom, and for which sequences."""

    process: GrammarProcess
    rows: list[Generated]


class _Mask(NamedTuple):
    """What a grammar says of its sequence. ``bits``: a bit a token, whether it may come next."""

    bits: Tensor
    accepting: bool
    stopped: bool
    fault: str


class Constraints:
    """Grammars of one engine. The process that keeps them starts with the first request that asks for one."""

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
        self._awaited: _Awaited | None = None
        self._bits: Tensor | None = None

    def open(self, asked: StructuredOutputs, tokens: Sequence[int] = ()) -> Constraint:
        """A grammar that has seen ``tokens``. Waits for the vocabulary at first. In any thread but the engine's.

        Raises RequestError for what is no grammar, and where the library is not installed; EngineError.
        """
        process = self._started()
        return Constraint(process, process.open(asked, list(tokens)))

    def begin(self, spans: Sequence[Span]) -> None:
        """Have the masks made for the sequences whose next token this step gives, while it runs."""
        if self._awaited is not None:  # a step failed before it took them
            self._receive()
        self._ask(
            [
                span.sequence
                for span in spans
                if span.sequence.constraint is not None and span.stop == len(span.sequence.tokens)
            ]
        )

    def apply(self, logits: Tensor, sequences: Sequence[Generated]) -> list[Ended]:
        """Forbid what the grammars do not allow, in place. Returns the sequences that get no further token."""
        rows = {row: each for row, each in enumerate(sequences) if each.params.structured_outputs is not None}
        if not rows:
            return []
        masks, ended = self._receive(), []
        for row, sequence in rows.items():
            if (mask := masks.get(id(sequence))) is not None:
                ended += self._follow(logits[row], sequence, mask)
        late = {row: sequence for row, sequence in rows.items() if id(sequence) not in masks}
        ended += self._take_over(list(late.values()))  # from another engine, perhaps
        masks = self._receive()
        for row, sequence in late.items():
            if (mask := masks.get(id(sequence))) is not None:
                ended += self._follow(logits[row], sequence, mask)
            elif not any(end.sequence is sequence for end in ended):
                text = "the process that keeps the grammars of structured outputs ended; try again"
                ended.append(Ended(sequence, EngineError(text)))
        return ended

    def _ask(self, sequences: list[Generated]) -> None:
        process = self._process
        if process is None or process.failed:
            return
        asked, rows = [], []
        for sequence in sequences:
            constraint = sequence.constraint
            if constraint is not None and constraint.process is process:
                rows.append(sequence)
                asked.append((constraint.number, constraint.unseen))
                constraint.unseen = []
        if not rows:
            return
        try:
            process.send(asked)
        except EngineError as error:
            logger.warning("%s", error)
        else:
            self._awaited = _Awaited(process, rows)

    def _take_over(self, sequences: list[Generated]) -> list[Ended]:
        """Give those grammars that have none yet, and ask for the masks of all."""
        ended = []
        for sequence in sequences:
            asked = sequence.params.structured_outputs
            if sequence.constraint is None and asked is not None:
                try:
                    sequence.constraint = self.open(asked, sequence.tokens[sequence.prompt_length :])
                except EngineError as error:
                    ended.append(Ended(sequence, error))
        self._ask(sequences)
        return ended

    def _follow(self, logits: Tensor, sequence: Generated, mask: _Mask) -> list[Ended]:
        """Mask a row. Returns the sequence where it ends."""
        if mask.fault:
            text = " ".join(mask.fault.split())
            return [Ended(sequence, EngineError(f"the grammar could not be followed any further: {text}"))]
        if mask.stopped and not sequence.ending:
            return [Ended(sequence, None)]
        logits.masked_fill_(self._forbidden(mask, sequence, logits), float("-inf"))
        return []

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

                from .process import GrammarProcess  # subprocess and mmap, which no first token should wait for

                if find_spec("llguidance") is None:
                    raise RequestError(
                        f"{PARAM}: expected the package llguidance on this server, which is not installed; "
                        "pip install 'medusa-runtime[structured]'",
                        PARAM,
                    )
                tokenizer = self._read_tokenizer()
                if tokenizer is None:
                    raise RequestError(
                        f"{PARAM}: this checkpoint has no tokenizer.json, so its tokens have no text", PARAM
                    )
                self._process = GrammarProcess(
                    tokenizer, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids, rows=self._rows
                )
            return self._process

    def _receive(self) -> dict[int, _Mask]:
        """The masks that were asked for last, by the identity of their sequences; none when the process is gone."""
        awaited, self._awaited = self._awaited, None
        if awaited is None:
            return {}
        process, rows = awaited
        try:
            states = process.receive()
        except EngineError as error:
            logger.warning("%s", error)
            return {}
        size = process.row_bytes
        return {
            id(sequence): _Mask(
                torch.frombuffer(process.masks, dtype=torch.uint8, count=size, offset=row * size), *state
            )
            for row, (sequence, state) in enumerate(zip(rows, states, strict=True))
        }

    def _forbidden(self, mask: _Mask, sequence: Generated, logits: Tensor) -> Tensor:
        """The tokens that must not come next; what ends the sequence may, once the grammar is satisfied."""
        vocab_size = logits.shape[0]
        if self._bits is None:
            # Each byte as eight: a mask of bits becomes one of bytes by a single lookup.
            self._bits = torch.tensor([[byte >> bit & 1 for bit in range(8)] for byte in range(256)], dtype=torch.bool)
        allowed = self._bits[mask.bits.int()].view(-1)[:vocab_size]
        ending = [token for token in sequence.ending if token < vocab_size]
        allowed[torch.tensor(ending, dtype=torch.long)] = mask.accepting
        return (~allowed).to(logits.device)
