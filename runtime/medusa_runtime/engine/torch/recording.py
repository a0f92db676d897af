"""The engine that `medusa materialize` asks the prompts of which it keeps the keys and values.

It is a torch engine on the CPU that ends each request with its first token. Before it delivers that, it writes the
prompt's blocks into a folder, as the two artifacts of ``state/prompts.py``.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from dataclasses import replace
from pathlib import Path

from ...config import Settings
from ...errors import EngineError, ModelError
from ...region.reader import Region
from ...state.fingerprint import fingerprint
from ...state.kinds import PROMPT_KV, PROMPTS
from ...state.prompts import BEGINNING, DIGEST_BYTES, RecordedPrompts, digest
from ...timeline import Timeline
from ..base import GenerateRequest
from ..serving.requests import Sink
from ..serving.sequence import SampledToken, Sequence, Span
from .engine import TorchEngine
from .kv_cache import BLOCK_TOKENS
from .recorded_blocks import block_shape, dtype_name


class RecordingEngine(TorchEngine):
    def __init__(self, region: Region, settings: Settings, timeline: Timeline, folder: Path) -> None:
        super().__init__(region, settings, timeline)
        self._folder = folder
        self._numbers: dict[tuple[int, bytes], int] = {}
        self._parents: list[int] = []
        self._block_tokens: list[int] = []
        self._weights_seen: str | None = None
        self._computed = 0  # tokens of prompts, in ``_spent_s`` seconds
        self._spent_s = 0.0

    def add(self, request: GenerateRequest, sink: Sink) -> None:
        super().add(replace(request, params=replace(request.params, max_tokens=1, min_tokens=0)), sink)

    def _deliver(
        self,
        spans: list[Span],
        sequences: list[Sequence],
        sampled: list[SampledToken],
        start_ns: int,
        *,
        request_next_masks: bool = False,
    ) -> None:
        self._computed += sum(span.stop - span.start for span in spans)
        self._spent_s += (time.monotonic_ns() - start_ns) / 1e9
        super()._deliver(spans, sequences, sampled, start_ns, request_next_masks=request_next_masks)

    def _recorded_blocks(self) -> None:
        """Leave out prompts that the bundle has: all are computed anew, and the time is measured."""
        if self._cache.states is not None:
            raise ModelError(
                f"--prompts cannot be used with {self.info.architecture}: its layers keep states, which are not "
                "recorded; expected none for this model"
            )

    def _release_sequence(self, sequence: Sequence) -> None:
        if sequence.computed >= sequence.prompt_length and sequence.adapter is None:
            self._record(sequence)
        super()._release_sequence(sequence)

    def _record(self, sequence: Sequence) -> None:
        """Write the blocks of a prompt that are not recorded yet."""
        parent, added = BEGINNING, []
        for number in range(sequence.prompt_length // BLOCK_TOKENS):
            tokens = sequence.tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
            key = (parent, array("i", tokens).tobytes())
            if key not in self._numbers:
                self._numbers[key] = len(self._parents)
                self._parents.append(parent)
                self._block_tokens += tokens
                added.append(sequence.blocks[number])
            parent = self._numbers[key]
        if not added:
            return
        try:
            self._write(added)
        except OSError as error:
            raise EngineError(
                f"keys and values cannot be written to {self._folder.parent} ({error.strerror}); expected room for "
                f"{len(self._parents) * self._cache.shape.block_bytes:,} bytes; TMPDIR may name another folder"
            ) from None

    def _write(self, added: list[int]) -> None:
        """Write these blocks of the KV cache, which are the last of those to record."""
        data = self._prompts().to_bytes()
        with (self._folder / PROMPT_KV.name).open("r+b" if self._parents[: -len(added)] else "w+b") as file:
            file.seek(DIGEST_BYTES + (len(self._parents) - len(added)) * self._cache.shape.block_bytes)
            for block in added:
                file.write(self._bytes(block))
            file.seek(0)
            file.write(digest(data))
        (self._folder / PROMPTS.name).write_bytes(data)

    def _bytes(self, block: int) -> bytes:
        values = self._cache.pool[:, :, block].contiguous()
        return ctypes.string_at(values.data_ptr(), values.nbytes)

    def _prompts(self) -> RecordedPrompts:
        if self._weights_seen is None:
            self._weights_seen = fingerprint(self._region)
        return RecordedPrompts(
            weights=self._weights_seen,
            dtype=dtype_name(self._cache),
            block_shape=block_shape(self._cache),
            max_model_len=self._model.config.longest,
            block_s=BLOCK_TOKENS * self._spent_s / max(self._computed, 1),
            parents=tuple(self._parents),
            tokens=tuple(self._block_tokens),
        )


__all__ = ["RecordingEngine"]
