"""The engine for encoders. It batches texts of similar length from all waiting requests."""

from __future__ import annotations

import base64
import logging
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...config import Settings
from ...container_limits import cpu_count
from ...errors import EngineError, MedusaError, RequestError
from ...region.reader import Region
from ...timeline import Timeline
from ..base import Delta, EmbedOptions, EngineInfo, GenerateRequest
from ..serving.cut import Cut
from .text_encoder import Encoder, EncoderOptions, Tokens

logger = logging.getLogger(__name__)

_IDLE_S = 0.2  # how often an idle engine looks at its stop event
_CHECK_EVERY_S = 0.25  # how often a call that waits checks whether it was cancelled
_WINDOW = 256  # a batch is made of so many of the texts that have waited longest
_MOST_TEXTS = 64


@dataclass(eq=False)
class _Text:
    tokens: Tokens
    vector: Future[Tensor] = field(default_factory=Future)


class EncoderEngine:
    """Serves ``embed``, one forward at a time, in ``run``. ``add`` refuses: an encoder cannot continue text."""

    def __init__(self, region: Region, settings: Settings, timeline: Timeline) -> None:
        with timeline.stage("config"):
            torch.set_num_threads(settings.threads or cpu_count())
        dtype = None if settings.dtype == "auto" else getattr(torch, settings.dtype)
        self._encoder = Encoder(region, timeline, EncoderOptions(dtype, settings.max_model_len))
        config = self._encoder.config
        kind = "classifier" if self._encoder.is_classifier else "encoder"
        self.info = EngineInfo("torch", kind, config.vocab_size, self._encoder.max_tokens, (), 0)
        self._timeline = timeline
        self._most_tokens = settings.max_batched_tokens  # of a batch. A text that is longer is alone in one
        self._changed = threading.Condition()
        self._waiting: list[_Text] = []
        self._running = self._embedded = self._tokens = self._steps = 0
        self._stop_error: MedusaError | None = None

    def embed(
        self,
        inputs: Sequence[str | Sequence[int] | Sequence[str]],
        cancelled: threading.Event | None = None,
        **named: Any,
    ) -> list[tuple[int, str]]:
        """Return each input's number of tokens and its vector (float32 little-endian, in base64).

        The ``named`` arguments are the fields of EmbedOptions. ``cancelled`` ends the call when it is set. Any thread
        may call this. Raises RequestError, EngineError (also for a vector that is not finite), and the error of weights
        that could not be loaded.
        """
        options = EmbedOptions(**named)
        dimensions, classify = options.dimensions, options.classify
        if classify is not self._encoder.is_classifier:
            able = (
                "classifies texts: expected /classify, /score or /rerank"
                if not classify
                else "makes embeddings: expected /v1/embeddings, /score or /rerank"
            )
            raise RequestError(f"this model {able}")
        size = self._encoder.size
        if dimensions is not None and dimensions > size:
            raise RequestError(
                f"dimensions: expected at most the {size} of this model, found {dimensions}", "dimensions"
            )
        texts = [_Text(self._encoder.tokenize(text, options)) for text in inputs]
        with self._changed:
            if self._stop_error is not None:
                raise self._stop_error
            self._waiting += texts
            self._changed.notify()
        found = []
        for text in texts:
            vector = self._encoder.activated(self._wait(text, texts, cancelled), options)
            if not bool(vector.isfinite().all()):  # NaN is no JSON, and ranks nothing
                raise EngineError(
                    "the model's answer for a text has numbers that are infinite or NaN; use --dtype float32, or check "
                    "the weights"
                )
            found.append((len(text.tokens), _packed(vector)))
        return found

    def _wait(self, text: _Text, texts: list[_Text], cancelled: threading.Event | None) -> Tensor:
        """Wait for a text's vector. If the call is cancelled, raise EngineError, and drop all of its ``texts``."""
        while True:
            try:
                return text.vector.result(None if cancelled is None else _CHECK_EVERY_S)
            except TimeoutError:
                if cancelled is not None and cancelled.is_set():
                    dropped = set(map(id, texts))
                    with self._changed:
                        self._waiting = [other for other in self._waiting if id(other) not in dropped]
                    raise EngineError("the request was cancelled") from None

    def run(self, stop: threading.Event) -> None:
        end: MedusaError = EngineError("the engine is stopping; try again")
        try:
            with torch.inference_mode():
                while not stop.is_set():
                    batch = self._next_batch()
                    if batch:
                        self._step(batch)
        except MedusaError as error:
            end = error
            raise
        finally:
            with self._changed:
                self._stop_error, left, self._waiting = end, self._waiting, []
            for text in left:
                text.vector.set_exception(end)

    def _next_batch(self) -> list[_Text]:
        """Take the text that has waited longest, and texts of the most similar lengths that fit into its batch."""
        with self._changed:
            if not self._waiting:
                self._changed.wait(_IDLE_S)
            if not self._waiting:
                return []
            first = self._waiting[0]
            near = sorted(self._waiting[1:_WINDOW], key=lambda text: abs(len(text.tokens) - len(first.tokens)))
            batch, longest = [first], len(first.tokens)
            for text in near:
                widest = max(longest, len(text.tokens))
                if len(batch) == _MOST_TEXTS or widest * (len(batch) + 1) > self._most_tokens:
                    break
                batch.append(text)
                longest = widest
            taken = set(map(id, batch))
            self._waiting = [text for text in self._waiting if id(text) not in taken]
            self._running = len(batch)
        return batch

    def _step(self, batch: list[_Text]) -> None:
        start_ns = time.monotonic_ns()
        try:
            vectors = self._encoder.pool([text.tokens for text in batch])
        except BaseException as error:
            failure = error if isinstance(error, MedusaError) else EngineError(f"the engine failed: {error}")
            for text in batch:
                text.vector.set_exception(failure)
            if isinstance(error, MedusaError) or not isinstance(error, Exception):
                raise
            logger.exception("a step failed; its %d texts end", len(batch))
            return
        finally:
            self._running = 0
        tokens = sum(len(text.tokens) for text in batch)
        if not self._steps:
            self._timeline.record("first_forward", start_ns, time.monotonic_ns(), tokens=tokens)
            self._timeline.mark("first_token")  # the first answer, which ends a cold start
        self._steps += 1
        self._embedded += len(batch)
        self._tokens += tokens
        for text, vector in zip(batch, vectors, strict=True):
            text.vector.set_result(vector)

    def add(self, request: GenerateRequest, sink: Callable[[Delta], None]) -> None:
        raise RequestError("this model makes embeddings and continues no text; expected a request to /v1/embeddings")

    def cancel(self, request_id: str) -> None:
        """Do nothing: there are no such requests."""

    def wait_ready(self) -> None:
        self._encoder.wait()

    def tokenize(self, text: str, add_special_tokens: bool = True, **cut: Any) -> list[int]:
        return self._encoder.tokenizer.tokenize(text, add_special_tokens, self.info, Cut(**cut))

    def detokenize(self, token_ids: list[int]) -> str:
        return self._encoder.tokenizer.detokenize(token_ids, self.info)

    def stats(self) -> dict[str, Any]:
        return {
            "running": self._running,
            "waiting": len(self._waiting),
            "prompt_tokens_total": self._tokens,
            "embeddings_total": self._embedded,
            "steps_total": self._steps,
        }

    def close(self) -> None:
        self._encoder.close()


def _packed(vector: Tensor) -> str:
    # The engine process does not import numpy.
    return base64.b64encode(array("f", vector.tolist()).tobytes()).decode()
