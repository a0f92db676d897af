"""Makes triton's kernels for decode steps ready in a thread of its own, before the first step needs them.

The first launch in a process takes most of a second: triton is imported, hashes its own library of 400 MB, and compiles
the kernels or reads them from its cache. The engine's thread can compute a prompt meanwhile.
"""

from __future__ import annotations

import logging
import threading
from functools import partial

import torch

from ...kernels import cuda
from ...models import ModelConfig
from ...timeline import Timeline
from ..torch.kv_cache import BLOCK_TOKENS

logger = logging.getLogger(__name__)


class DecodeKernels:
    """The kernels with which one sequence's decode step reads and writes a model's KV cache on ``device``.

    Kernels for larger batches, which split contexts less, are compiled by the first step that needs them.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, timeline: Timeline) -> None:
        self._config, self._dtype, self._device = config, dtype, device
        self._timeline = timeline
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begin to make the kernels ready. Can be called twice; does nothing without triton."""
        if self._thread is None and cuda.triton_obstacle() is None:
            self._thread = threading.Thread(target=self._run, name="decode-kernels", daemon=True)
            self._thread.start()

    @property
    def under_way(self) -> bool:
        """Whether the thread that makes them ready is at work."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until they are ready, if that has begun."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            with self._timeline.stage("decode_kernels"), torch.inference_mode():
                self._launch()
        except Exception as error:  # noqa: BLE001 - the step that needs them raises it, too
            logger.info("the kernels of decode steps could not be made ready: %s: %s", type(error).__name__, error)

    def _launch(self) -> None:
        """Decode with one block of memory. Its strides are those of the KV cache, and so the same kernels are used."""
        config, zeros = self._config, partial(torch.zeros, dtype=self._dtype, device=self._device)
        keys, values = zeros((2, 1, BLOCK_TOKENS, config.num_kv_heads, config.head_dim))
        q = zeros((1, config.num_heads, config.head_dim))
        k, v = zeros((2, 1, config.num_kv_heads, config.head_dim))
        slots, contexts = (torch.full((1,), number, device=self._device) for number in (0, 1))
        tables = torch.zeros((1, 1), dtype=torch.int32, device=self._device)
        cuda.write_decode_kv(keys.flatten(0, 1), values.flatten(0, 1), slots, k, v)
        for window in dict.fromkeys(config.windows):
            cuda.paged_decode(q, keys, values, tables, contexts, scale=config.head_dim**-0.5, window=window)


__all__ = ["DecodeKernels"]
