"""The requests of an engine that have not ended: their admission, and the delivery of their tokens and their end."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ...config import Settings
from ...errors import EngineError, MedusaError, OverloadedError, RequestError, from_code
from ...timeline import Timeline
from ..base import Delta, EngineInfo, GenerateRequest
from .completion import advance, ended
from .detokenizer import Detokenizer
from .sequence import Sampled, Sequence
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
        self,
        settings: Settings,
        tokenizer: Tokenizer,
        info: EngineInfo,
        timeline: Timeline,
        release: Callable[[Sequence], None],
    ) -> None:
        self.generated_tokens = 0
        self._prompt_tokens = 0
        self._settings = settings
        self._tokenizer = tokenizer
        self._info = info
        self._timeline = timeline
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
        sequence = self.prepare(request, sink)
        self.admit(sequence)
        return sequence

    def prepare(self, request: GenerateRequest, sink: Sink) -> Sequence:
        """Check a request that ``admit`` is to take. Raises what ``open`` does."""
        self._check_room()
        if isinstance(request.prompt, str):
            self._tokenizer.check_length(request.prompt, self._info.max_model_len)
            prompt = self._tokenizer.encode(request.prompt, request.add_special_tokens)
        else:
            prompt = list(request.prompt)
        return self._sequence(request, prompt, sink)

    def admit(self, sequence: Sequence) -> None:
        """Take a prepared sequence in. Raises OverloadedError, and RequestError for an id that is in use."""
        with self._lock:
            self._check_room()
            if sequence.id in self._sequences:
                raise RequestError(f"id: expected one that no running request has, found {sequence.id!r}")
            if not self._sequences:
                self._throughput.begin()
            self._sequences[sequence.id] = sequence
            self._prompt_tokens += sequence.prompt_length

    def give(self, sequence: Sequence, sampled: Sampled) -> Delta:
        """Append a token to its sequence, and hand what comes of it to the caller."""
        delta = advance(sequence, sampled, self._tokenizer)
        if not self.generated_tokens:
            self._timeline.mark("first_token")
        self.generated_tokens += 1
        self.tell(sequence, delta)
        return delta

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
        """End a sequence that did not end by itself, and has not ended yet."""
        if self.get(sequence.id) is sequence:
            self.tell(sequence, ended(sequence, reason, None if error is None else (error.code, str(error))))

    def drop(self, sequence: Sequence) -> None:
        """Let go of a sequence without another delta."""
        self._release(sequence)
        with self._lock:
            del self._sequences[sequence.id]
        self._throughput.note()

    @contextlib.contextmanager
    def serving(self, known: Callable[[Exception], MedusaError | None] = lambda error: None) -> Iterator[None]:
        """Take requests until the end of this block, and then end all of them with the error that ended it.

        ``known`` may give an exception that is none of ours a better error than that the engine failed.
        """
        end: MedusaError = EngineError("the engine is stopping; try again")
        try:
            yield
        except MedusaError as error:
            end = error
            raise
        except Exception as error:
            end = known(error) or EngineError(f"the engine failed: {type(error).__name__}: {error}")
            raise end from error
        finally:
            self.close(end)

    def close(self, error: MedusaError) -> None:
        """Take no more requests, and end all with this error."""
        with self._lock:
            self._end = error
        for sequence in self.running():
            self.end(sequence, "error", error)

    def stats(self, running: int, kv_tokens_used: int) -> dict[str, Any]:
        """Return what every engine's ``stats`` has. ``running``: how many requests compute; the others wait."""
        return {
            "running": running,
            "waiting": max(len(self) - running, 0),
            "kv_tokens": self._info.kv_tokens,
            "kv_tokens_used": kv_tokens_used,
            "prompt_tokens_total": self._prompt_tokens,
            "generated_tokens_total": self.generated_tokens,
        }

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
