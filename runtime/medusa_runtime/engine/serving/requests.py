"""An engine's unfinished requests: admits them, delivers their tokens, and ends them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ...config import Settings
from ...errors import EngineError, MedusaError, OverloadedError, RequestError, from_code
from ...timeline import Timeline
from ..base import Delta, EngineInfo, GenerateRequest
from .bad_words import bad_word_tokens
from .completion import advance, final_delta, take_prompt_logprobs
from .detokenizer import Detokenizer
from .sequence import SampledToken, Sequence
from .throughput import Throughput
from .tokenizer import Tokenizer
from .transcript import Transcript
from .validation import check_params, check_prompt, check_prompt_logprobs

logger = logging.getLogger(__name__)

_TELLING = 512  # tokens of prompts in a step; fewer do not keep a GPU busy

Sink = Callable[[Delta], None]


class Requests:
    """The unfinished requests of one engine. Any thread may open one; the engine's own thread delivers and ends them.

    ``release`` frees what the engine holds for a sequence. It is called once, before the last delta is delivered.
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
        self._prefill_tokens_per_s = 0.0
        self._settings = settings
        self._tokenizer = tokenizer
        self._info = info
        self._timeline = timeline
        self._release = release
        self._eos_token_ids = frozenset(info.eos_token_ids)
        self._sequences: dict[str, Sequence] = {}
        self._lock = threading.Lock()
        self._throughput = Throughput()
        self._end: MedusaError | None = None  # the reason why no more requests are admitted

    def __len__(self) -> int:
        return len(self._sequences)

    def get(self, request_id: str) -> Sequence | None:
        return self._sequences.get(request_id)

    def unfinished(self) -> list[Sequence]:
        """Return the sequences that have not ended, in the order of their admission."""
        with self._lock:
            return list(self._sequences.values())

    def open(self, request: GenerateRequest, sink: Sink) -> Sequence:
        """Check a request and admit it.

        Raises RequestError for a request that cannot be served, and OverloadedError if too many wait already.
        """
        self._check_room()
        if isinstance(request.prompt, str):
            self._tokenizer.check_length(request.prompt, self._info.max_model_len)
            prompt = self._tokenizer.encode(request.prompt, request.add_special_tokens)
        else:
            prompt = list(request.prompt)
        sequence = self._sequence(request, prompt, sink)
        with self._lock:
            self._check_room()
            if sequence.id in self._sequences:
                raise RequestError(f"id: expected one that no running request has, found {sequence.id!r}")
            if not self._sequences:
                self._throughput.start()
            self._sequences[sequence.id] = sequence
            self._prompt_tokens += sequence.prompt_length
        return sequence

    @contextlib.contextmanager
    def withdrawing(self, sequence: Sequence) -> Iterator[None]:
        """Forget a sequence that was just opened, without a delta, if this block raises."""
        try:
            yield
        except BaseException:
            with self._lock:
                if self.get(sequence.id) is sequence:
                    del self._sequences[sequence.id]
            raise

    def add_token(self, sequence: Sequence, sampled: SampledToken) -> Delta:
        """Append a token to its sequence, and deliver the delta that results from it. Returns that delta."""
        delta = advance(sequence, sampled, self._tokenizer)
        if not self.generated_tokens:
            self._timeline.mark("first_token")
        self.generated_tokens += len(delta.token_ids)
        self.deliver(sequence, delta)
        return delta

    def deliver(self, sequence: Sequence, delta: Delta) -> None:
        """Deliver a delta to the sequence's sink. A delta with a ``finish_reason`` ends the sequence."""
        last = delta.finish_reason is not None
        if last:
            self.remove(sequence)
        try:
            sequence.sink(delta)
        except Exception:
            logger.exception("the sink of request %s failed; the request is cancelled", sequence.id)
            if not last:
                self.remove(sequence)

    def end(self, sequence: Sequence, reason: str, error: MedusaError | None = None) -> None:
        """End a sequence with this ``finish_reason``, unless it has ended already."""
        if self.get(sequence.id) is sequence:
            delta = final_delta(sequence, reason, None if error is None else (error.code, str(error)))
            if reason == "stop" and sequence.prompt_scores is not None:  # a grammar has ended it before its first token
                delta = delta._replace(prompt_logprobs=take_prompt_logprobs(sequence))
            self.deliver(sequence, delta)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and free what it holds, without delivering another delta."""
        self._release(sequence)
        with self._lock:
            del self._sequences[sequence.id]
        self._throughput.record_end()

    @contextlib.contextmanager
    def serving(self, translate: Callable[[Exception], MedusaError | None] = lambda error: None) -> Iterator[None]:
        """Admit requests during this block. At its end, all that are left get the error that ended it.

        ``translate`` may translate an exception that is not a MedusaError; by default the error says that the engine
        failed.
        """
        end: MedusaError = EngineError("the engine is stopping; try again")
        try:
            yield
        except MedusaError as error:
            end = error
            raise
        except Exception as error:
            end = translate(error) or EngineError(f"the engine failed: {type(error).__name__}: {error}")
            raise end from error
        finally:
            self.close(end)

    def close(self, error: MedusaError) -> None:
        """Admit no more requests, and end all with this error."""
        with self._lock:
            self._end = error
        for sequence in self.unfinished():
            self.end(sequence, "error", error)

    def note_prefill(self, tokens: int, start_ns: int) -> None:
        """Note that a step which began then (by the monotonic clock) has computed so many tokens of prompts.

        A step of a few tokens takes about as long as one of many, so it says nothing of what can be computed.
        """
        if tokens >= min(_TELLING, self._settings.max_batched_tokens // 2):
            rate = tokens * 1e9 / max(time.monotonic_ns() - start_ns, 1)
            self._prefill_tokens_per_s = max(self._prefill_tokens_per_s, rate)

    def stats(self, running: int, kv_tokens_used: int) -> dict[str, Any]:
        """Return the numbers that every engine's ``stats`` has.

        ``running`` is how many requests are being computed; all others count as waiting. ``kv_tokens_used`` is how many
        tokens of the KV cache are taken.
        """
        return {
            "running": running,
            "waiting": max(len(self) - running, 0),
            "kv_tokens": self._info.kv_tokens,
            "kv_tokens_used": kv_tokens_used,
            "prompt_tokens_total": self._prompt_tokens,
            "prefill_tokens_per_s": round(self._prefill_tokens_per_s),
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
        check_params(params, self._info, has_text=self._tokenizer.present)
        check_prompt(prompt, self._info, room=0 if params.max_tokens == 0 else 1)
        check_prompt_logprobs(params, len(prompt))
        detokenizer = None
        if self._tokenizer.present:
            skip = params.skip_special_tokens
            detokenizer = Detokenizer(lambda ids: self._tokenizer.decode(ids, skip), prompt)
        limit = self._info.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(prompt) + params.max_tokens)
        transcript = Transcript(detokenizer, params.stop, include_stop=params.include_stop_str_in_output)
        bad_words = bad_word_tokens(params.bad_words, self._tokenizer) if params.bad_words else ()
        return Sequence(
            request,
            prompt,
            sink,
            limit=limit,
            eos_token_ids=self._eos_token_ids,
            transcript=transcript,
            bad_words=bad_words,
        )


__all__ = ["Requests", "Sink"]
