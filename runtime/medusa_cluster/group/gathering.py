"""The gathering of the other workers' keys and values into the leader's cache (ParaServe §6.2).

All workers send at once. Each has its own connection and its own thread in the leader, so steps go on meanwhile. A full
block never changes, so it can be copied while other blocks are written. Blocks keep their numbers.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from medusa_runtime.engine.torch.kv_cache import KvCache
from medusa_runtime.errors import EngineError, MedusaError
from medusa_runtime.models.layer_range import LayerRange
from torch import Tensor

from .wire.channel import Channel
from .wire.message import Kind, Message, buffer_of, json_message


class BlockSource(NamedTuple):
    """A worker whose blocks are gathered: its layers, and the connection for its blocks."""

    layers: LayerRange
    channel: Channel


class Gathering:
    """Rounds of blocks from all sources.

    At the end of each round, one of the threads calls ``done`` with None, or with the error if the round failed.
    """

    def __init__(
        self, cache: KvCache, sources: list[BlockSource], group: int, done: Callable[[MedusaError | None], None]
    ) -> None:
        self._cache = cache
        self._group = group
        self._done = done
        self._left = 0
        self._failed = False
        self._lock = threading.Lock()
        self._rounds: list[queue.SimpleQueue[list[int] | None]] = []
        self.bytes = 0
        for source in sources:
            rounds: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
            self._rounds.append(rounds)
            threading.Thread(target=self._receive, args=(source, rounds), name="group-gather", daemon=True).start()

    def fetch(self, blocks: list[int]) -> None:
        """Begin a round: ask every source for these blocks, by their numbers."""
        self._left = len(self._rounds)
        for rounds in self._rounds:
            rounds.put(blocks)

    def close(self) -> None:
        for rounds in self._rounds:
            rounds.put(None)

    def _receive(self, source: BlockSource, rounds: queue.SimpleQueue[list[int] | None]) -> None:
        with torch.inference_mode():
            while (blocks := rounds.get()) is not None:
                try:
                    if blocks:
                        self._round(source, blocks)
                except MedusaError as error:
                    self._end(error)
                    return
                self._end(None)

    def _round(self, source: BlockSource, blocks: list[int]) -> None:
        start, stop, _ = source.layers
        pool = self._cache.pool[start - self._cache.first_layer : stop - self._cache.first_layer]
        source.channel.send(json_message(Kind.FETCH, self._group, {"blocks": blocks}))
        shape = (stop - start, *pool.shape[1:2], *pool.shape[3:])
        for number in blocks:
            message = source.channel.receive()
            if message is None:
                raise EngineError("a worker of the group ended while its keys and values were gathered")
            if message.kind is not Kind.BLOCK or message.rows != number or len(message.body) != _bytes(shape, pool):
                raise EngineError("expected a block of keys and values from a worker, found something else")
            pool[:, :, number] = torch.frombuffer(message.body, dtype=pool.dtype).view(shape)
            self.bytes += len(message.body)

    def _end(self, error: MedusaError | None) -> None:
        with self._lock:
            self._left -= 1
            last, failed = self._left == 0, self._failed
            self._failed = failed or error is not None
        if error is not None and not failed:
            self._done(error)
        elif last and not self._failed:
            self._done(None)


def send_blocks(cache: KvCache, layers: LayerRange, channel: Channel, group: int, rank: int) -> None:
    """Send the blocks that the leader asks for, until it closes the connection. Runs in a worker."""
    pool = cache.pool[layers.start - cache.first_layer : layers.stop - cache.first_layer]
    try:
        while (message := channel.receive()) is not None:
            for number in message.values().get("blocks", ()):
                if type(number) is not int or not 0 <= number < pool.shape[2]:
                    raise EngineError(f"expected the number of a block below {pool.shape[2]}, found {number!r}")
                block = pool[:, :, number].contiguous()
                channel.drain()  # a leader that stands still takes none
                channel.send(Message(Kind.BLOCK, group, rank=rank, rows=number, body=buffer_of(block)))
    except (MedusaError, TypeError):
        channel.close()


def _bytes(shape: tuple[int, ...], pool: Tensor) -> int:
    size = pool.dtype.itemsize
    for length in shape:
        size *= length
    return size


__all__ = ["BlockSource", "Gathering", "send_blocks"]
