"""The gathering of the other workers' keys and values into the leader's cache (ParaServe §6.2).

All workers send at once. Each has its own connection and its own thread in the leader, so steps go on meanwhile. A full
block never changes, so it can be copied while other blocks are written. Blocks keep their numbers. On GPUs, many blocks
go between the device and the host in one copy.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from medusa_runtime.engine.torch.engine import step_error
from medusa_runtime.engine.torch.kv_cache import KvCache
from medusa_runtime.engine.torch.transfers import BlockCopies
from medusa_runtime.errors import EngineError, MedusaError
from medusa_runtime.models.layer_range import LayerRange
from torch import Tensor

from .wire.channel import Channel
from .wire.message import Kind, Message, buffer_of, json_message

logger = logging.getLogger(__name__)


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
        self._closed = False
        self._rounds: list[queue.SimpleQueue[list[int] | None]] = []
        self._writing: list[threading.Lock] = []  # each is held while a source's blocks are written to the cache
        self.bytes = 0
        for source in sources:
            rounds: queue.SimpleQueue[list[int] | None] = queue.SimpleQueue()
            writing = threading.Lock()
            self._rounds.append(rounds)
            self._writing.append(writing)
            arguments = (source, rounds, writing)
            threading.Thread(target=self._receive, args=arguments, name="group-gather", daemon=True).start()

    def fetch(self, blocks: list[int]) -> None:
        """Begin a round: ask every source for these blocks, by their numbers."""
        self._left = len(self._rounds)
        for rounds in self._rounds:
            rounds.put(blocks)

    def close(self) -> None:
        """End all rounds. Afterwards nothing is written to the cache, even if a round was under way."""
        self._closed = True
        for rounds in self._rounds:
            rounds.put(None)
        for writing in self._writing:
            with writing:
                pass

    def _receive(
        self, source: BlockSource, rounds: queue.SimpleQueue[list[int] | None], writing: threading.Lock
    ) -> None:
        with torch.inference_mode():
            copies: BlockCopies | None = None
            while (blocks := rounds.get()) is not None:
                try:
                    if blocks:
                        copies = copies or BlockCopies(self._cache, source.layers.start, source.layers.stop)
                        self._round(source.channel, copies, blocks, writing)
                except Exception as error:  # noqa: BLE001 - such as a GPU's full memory: the leader waits for this round
                    self._end(step_error(error))
                    return
                self._end(None)

    def _round(self, channel: Channel, copies: BlockCopies, blocks: list[int], writing: threading.Lock) -> None:
        channel.send(json_message(Kind.FETCH, self._group, {"blocks": blocks}))
        for first in range(0, len(blocks), copies.most):
            numbers = blocks[first : first + copies.most]
            found = [self._block(channel, copies, number) for number in numbers]
            with writing:
                if self._closed:
                    return
                copies.write(numbers, found)
            self.bytes += len(numbers) * copies.block_bytes

    def _block(self, channel: Channel, copies: BlockCopies, number: int) -> Tensor:
        """Receive one block, which must have this number."""
        message = channel.receive()
        if message is None:
            raise EngineError("a worker of the group ended while its keys and values were gathered")
        if message.kind is not Kind.BLOCK or message.rows != number or len(message.body) != copies.block_bytes:
            raise EngineError("expected a block of keys and values from a worker, found something else")
        return torch.frombuffer(message.body, dtype=copies.dtype).view(copies.shape)

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
    try:
        with torch.inference_mode():
            copies = BlockCopies(cache, layers.start, layers.stop)
            while (message := channel.receive()) is not None:
                numbers = _numbers(message, copies)
                for first in range(0, len(numbers), copies.most):
                    some = numbers[first : first + copies.most]
                    for number, block in zip(some, copies.read(some), strict=True):
                        channel.drain()  # a leader that stands still takes none
                        channel.send(Message(Kind.BLOCK, group, rank=rank, rows=number, body=buffer_of(block)))
    except Exception as error:  # noqa: BLE001 - whatever it is, the leader must not wait for this worker
        logger.warning("keys and values are sent to the leader no longer: %s", step_error(error))
        channel.close()


def _numbers(message: Message, copies: BlockCopies) -> list[int]:
    """Return the numbers of the blocks that a message asks for. Raises EngineError if one of them cannot be right."""
    numbers = list(message.values().get("blocks", ()))
    for number in numbers:
        if type(number) is not int or not copies.has(number):
            raise EngineError(f"expected the number of a block that the cache has, found {number!r}")
    return numbers


__all__ = ["BlockSource", "Gathering", "send_blocks"]
