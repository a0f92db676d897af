"""The requests of an engine that have not ended: their admission, and the delivery of their tokens and their end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ...config import Settings
from ...errors import MedusaError, OverloadedError, RequestError, from_code
from ..base import Delta, EngineInfo, GenerateRequest
from .completion import ended
from .detokenizer import Detokenizer
from .sequence import Sequence
from .throughput import Throughput
from .tokenizer import Tokenizer
from .transcript import Transcript
from .validation import check_params, check_prompt

logger = logging.getLogger(__name__)

Sink = Callable[[Delta], None]


class Requests:
    """The running requests. Any thread opens one; the engine's own thread delivers its deltas and ends it.

    ``release`` frees what the engine holds for a sequence; it is called once, before the last delta is delivered.
    """

    def __init__(
        self, settings: Settings, tokenizer: Tokenizer, info: EngineInfo, release: Callable[[Sequence], None]
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._info = info
        self._release = release
        self._eos_token_ids = frozenset(info.eos_token_ids)
        self._sequences: dict[str, Sequence] = {}
        self._lock = threading.Lock()
        self._throughput = Throughput()
        self._end: MedusaError | None = None  # why no more requests are taken

    def __len__(self) -> int:
        return len(self._sequences)

    def get(self, request_id: str) -> Sequence | None:
        return self._sequences.get(request_id)

    def running(self) -> list[Sequence]:
        """Those that have not ended, in the order of their admission."""
        with self._lock:
            return list(self._sequences.values())

    def open(self, request: GenerateRequest, sink: Sink) -> Sequence:
        """Admit a request. RequestError for one that cannot be served, OverloadedError when too many wait already."""
        self._check_room()
        if isinstance(request.prompt, str):
            self._tokenizer.check_length(request.prompt, self._info.max_model_len)
            prompt = self._tokenizer.encode(request.prompt, request.add_special_tokens)
        else:
            prompt = list(request.prompt)
        return self.register(request, prompt, sink)

    def register(self, request: GenerateRequest, prompt: list[int], sink: Sink) -> Sequence:
        """Admit a request like ``open``, with a prompt that is already tokenized."""
        sequence = self._sequence(request, prompt, sink)
        with self._lock:
            self._check_room()
            if sequence.id in self._sequences:
                raise RequestError(f"id: expected one that no running request has, found {sequence.id!r}")
            if not self._sequences:
                self._throughput.begin()
            self._sequences[sequence.id] = sequence
        return sequence

    def tell(self, sequence: Sequence, delta: Delta) -> None:
        """Hand a delta to its caller; one with a ``finish_reason`` ends the sequence."""
        last = delta.finish_reason is not None
        if last:
            self.drop(sequence)
        try:
            sequence.sink(delta)
        except Exception:
            logger.exception("the sink of request %s failed; the request is cancelled", sequence.id)
            if not last:
                self.drop(sequence)

    def end(self, sequence: Sequence, reason: str, error: MedusaError | None = None) -> None:
        """End a sequence that did not end by itself."""
        self.tell(sequence, ended(sequence, reason, None if error is None else (error.code, str(error))))

    def drop(self, sequence: Sequence) -> None:
        """Let go of a sequence without another delta."""
        self._release(sequence)
        with self._lock:
            del self._sequences[sequence.id]
        self._throughput.note()

    def close(self, error: MedusaError) -> None:
        """Take no more requests, and end all with this error."""
        with self._lock:
            self._end = error
            sequences = list(self._sequences.values())
        for sequence in sequences:
            self.end(sequence, "error", error)

    def _check_room(self) -> None:
        if self._end is not None:
            raise from_code(self._end.code, str(self._end))
        most = self._settings.max_concurrency + self._settings.max_waiting
        if len(self._sequences) >= most:
            raise OverloadedError(
                f"expected at most {self._settings.max_waiting} waiting requests, found as many; try again later",
                self._throughput.retry_after_s(self._settings.max_waiting),
            )

    def _sequence(self, request: GenerateRequest, prompt: list[int], sink: Sink) -> Sequence:
        params = request.params
        check_prompt(prompt, self._info)
        check_params(params, self._info, has_text=self._tokenizer.present)
        detokenizer = None
        if self._tokenizer.present:
            skip = params.skip_special_tokens
            detokenizer = Detokenizer(lambda ids: self._tokenizer.decode(ids, skip), prompt)
        limit = self._info.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        transcript = Transcript(detokenizer, params.stop, include_stop=params.include_stop_str_in_output)
        return Sequence(request, prompt, sink, limit=limit, eos_token_ids=self._eos_token_ids, transcript=transcript)


__all__ = ["Requests", "Sink"]
