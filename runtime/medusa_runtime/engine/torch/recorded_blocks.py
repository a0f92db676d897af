"""The keys and values of recorded prompts, from a state bundle. They come into the region beside the weights."""

from __future__ import annotations

import logging
import math
import threading
import time
from array import array
from collections.abc import Callable

from torch import Tensor

from ...errors import MedusaError, StateError
from ...load.views import bytes_tensor
from ...region.reader import Region
from ...state.fingerprint import fingerprint
from ...state.kinds import PROMPT_KV, PROMPTS, file_name
from ...state.prompts import BEGINNING, DIGEST_BYTES, RecordedPrompts, digest
from .kv_cache import KvCache

logger = logging.getLogger(__name__)

_LOOK_S = 0.005
_LONGEST_S = 120.0  # a request waits no longer, whatever a bundle says that its blocks have taken


class RecordedBlocks:
    """The blocks of recorded prompts, by number. ``beginning`` stands for what is before a prompt's first block.

    Until the keys and values are there, they are ``pending``. If they do not come, the blocks are computed like others.
    """

    beginning = BEGINNING

    def __init__(self, prompts: RecordedPrompts, data: bytes, region: Region, cache: KvCache) -> None:
        """``data`` are the bytes that ``prompts`` was read from."""
        self._prompts = prompts
        self._digest = digest(data)
        self._region = region
        self._cache = cache
        self._blocks: Tensor | None = None
        self._ended = threading.Event()
        self._loaded_s = math.inf  # when the weights were there
        self._wake_s = math.inf  # when a request that waits is to be looked at
        self._given_up = False
        self._thread: threading.Thread | None = None
        self._children = {
            (parent, array("i", prompts.block(number)).tobytes()): number
            for number, parent in enumerate(prompts.parents)
        }
        self.unverified = False  # whether blocks are in use of which nothing says yet that these weights compute them

    @property
    def pending(self) -> bool:
        """True until the keys and values are there, or will certainly not come."""
        return not self._ended.is_set()

    @property
    def present(self) -> bool:
        return self._blocks is not None

    def child(self, parent: int, tokens: bytes) -> int | None:
        """Return the number of the block with these tokens (int32 each) behind a block; None if none is recorded."""
        return self._children.get((parent, tokens))

    def copy(self, numbers: list[int], blocks: list[int]) -> None:
        """Copy recorded blocks into these blocks of the KV cache. They must be ``present``."""
        assert self._blocks is not None
        for number, block in zip(numbers, blocks, strict=True):
            self._cache.pool[:, :, block].copy_(self._blocks[number])
        self.unverified = True

    def is_worth_waiting(self, blocks: int) -> bool:
        """Return whether a prompt should wait for this many pending blocks, which it could also compute.

        Once the weights are loaded, it waits no longer than it took to compute them.
        """
        until = self._loaded_s + min(blocks * self._prompts.block_s, _LONGEST_S)
        if time.monotonic() < until:
            self._wake_s = min(self._wake_s, until)
            return True
        if not self._given_up:
            logger.warning("recorded prompts are computed: that is faster than to wait longer for keys and values")
        self._given_up = True
        return False

    def fetch(self, is_loaded: Callable[[], bool], then: Callable[[], None]) -> None:
        """Begin to wait for the keys and values.

        ``then`` is called when they are there, and when waiting requests are to be looked at again.
        """
        self._thread = threading.Thread(target=self._fetch, args=(is_loaded, then), name="recorded-blocks", daemon=True)
        self._thread.start()

    def verify(self) -> bool:
        """Return whether the weights are those that have computed the blocks. If not, they are not used any more.

        Waits until all weights are there. Raises like ``region.wait``.
        """
        self.unverified = False
        if fingerprint(self._region) == self._prompts.weights:
            return True
        logger.warning("the recorded prompts were computed by other weights, and are not used; materialize again")
        self._blocks = None
        return False

    def close(self) -> None:
        """Wait for the keys and values no longer. May be called twice."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _fetch(self, is_loaded: Callable[[], bool], then: Callable[[], None]) -> None:
        try:
            while self._blocks is None and not self._ended.is_set():
                if self._loaded_s == math.inf and is_loaded():
                    self._loaded_s = time.monotonic()
                    then()
                elif time.monotonic() > self._wake_s:
                    self._wake_s = math.inf
                    then()
                try:
                    view = self._region.view_file(file_name(PROMPT_KV.name), 0.0)
                except TimeoutError:
                    self._ended.wait(_LOOK_S)
                else:
                    self._blocks = self._checked(view)
        except MedusaError as error:
            logger.warning("the keys and values of recorded prompts are not used: %s", error)
        self._ended.set()
        then()

    def _checked(self, view: memoryview | None) -> Tensor:
        shape, dtype = self._prompts.block_shape, self._cache.shape.dtype
        if view is None:
            raise StateError("they did not come")
        expected = DIGEST_BYTES + len(self._prompts.parents) * self._cache.shape.block_bytes
        if len(view) != expected or view[:DIGEST_BYTES] != self._digest:
            raise StateError(f"expected those of the recorded prompts, of {expected:,} bytes, found others")
        return bytes_tensor(view[DIGEST_BYTES:]).view(dtype).view(len(self._prompts.parents), *shape)


def recorded_blocks(region: Region, cache: KvCache, max_model_len: int) -> RecordedBlocks | None:
    """Return the recorded blocks of a region's state bundle. None, which is logged, if they are not for this cache.

    ``max_model_len`` is the length that was set for this start.
    """
    try:
        view = region.view_file(file_name(PROMPTS.name), 0.0)
    except TimeoutError:  # it is larger than one that we have made
        return None
    if view is None:
        return None
    try:
        prompts = RecordedPrompts.from_bytes(bytes(view))
    except StateError as error:
        logger.warning("the recorded prompts are not used: %s", error)
        return None
    there = _purpose(prompts.block_shape, prompts.dtype, prompts.max_model_len)
    here = _purpose(block_shape(cache), dtype_name(cache), max_model_len)
    if there != here:
        logger.warning("the recorded prompts are for %s; expected %s; materialize again", there, here)
        return None
    return RecordedBlocks(prompts, bytes(view), region, cache)


def _purpose(shape: tuple[int, ...], dtype: str, max_model_len: int) -> str:
    return f"{ascii(dtype)[1:-1][:20]}, blocks of {'x'.join(map(str, shape))} and up to {max_model_len} tokens"


def dtype_name(cache: KvCache) -> str:
    return str(cache.shape.dtype).removeprefix("torch.")


def block_shape(cache: KvCache) -> tuple[int, int, int, int, int]:
    """Return the shape of a block's keys and values: (layers, 2, tokens, kv_heads, head_dim)."""
    layers, two, _, tokens, kv_heads, head_dim = cache.pool.shape
    return layers, two, tokens, kv_heads, head_dim


__all__ = ["RecordedBlocks", "block_shape", "dtype_name", "recorded_blocks"]
