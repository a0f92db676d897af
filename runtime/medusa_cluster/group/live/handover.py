"""Live scaling: a new instance helps an overloaded one while its layers arrive (BlitzScale §5.2).

    source ─offer▶ target's queue ─layer by layer, as they arrive▶ … ◀pull─ source ─handover▶ the other layers, sampling

The source keeps its requests, and offers prompts to prefill. The target runs one layer at a time, of the first batch
whose next layer it has. An idle source takes the batch at the head of the queue, with its hidden states and the keys
and values of the layers that are done, and runs the rest. No batch waits for a layer that the source could run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from medusa_runtime.engine.serving.sequence import Sequence, Span
from medusa_runtime.engine.torch.kv_cache import BLOCK_TOKENS, KvCache, KvShape
from medusa_runtime.engine.torch.transfers import on_host
from medusa_runtime.errors import EngineError
from torch import Tensor

from ..wire.channel import Channel
from ..wire.message import DTYPES, Kind, Message, buffer_of, hidden_states, json_message

BATCH_TOKENS = 256  # a batch is full with so many tokens, so that one pull does not take too much


class Batch(NamedTuple):
    """Whole prompts that are prefilled together. ``tables`` are the block tables that they had when offered.

    A batch that another target has begun has ``hidden``, the result of its first ``done`` layers. Their keys and values
    are with the source.
    """

    number: int
    spans: list[Span]
    tables: list[list[int]]
    began_ns: int
    done: int = 0
    hidden: Tensor | None = None

    @property
    def lengths(self) -> list[int]:
        """Return the tokens of each prompt."""
        return [span.stop for span in self.spans]

    @property
    def alive(self) -> list[Span]:
        """Return the spans whose sequences still have these blocks."""
        return [span for span, table in zip(self.spans, self.tables, strict=True) if span.sequence.blocks is table]


class Handover(NamedTuple):
    """A batch that comes back from the target, with the results of the ``done`` layers that have run.

    ``caches`` are those of the layers that this target has run, which are the last ones of these.
    """

    number: int
    done: int
    hidden: Tensor | None
    caches: list[list[Tensor]]  # prompt → its parts in order, each [layers, 2, tokens, kv_heads, head_dim]


def grouped(spans: list[Span]) -> list[list[Span]]:
    """Put neighbouring spans together, until each group has at least ``BATCH_TOKENS`` tokens."""
    groups: list[list[Span]] = []
    size = BATCH_TOKENS
    for span in spans:
        if size >= BATCH_TOKENS:
            groups.append([])
            size = 0
        groups[-1].append(span)
        size += span.stop - span.start
    return groups


def offer(group: int, batch: Batch) -> list[Message]:
    """Return the messages that offer a batch: its prompts, and the hidden states if some of its layers have run."""
    prompts = [span.sequence.tokens[: span.stop] for span in batch.spans]
    found = [json_message(Kind.OFFER, group, {"prompts": prompts, "done": batch.done}, step=batch.number)]
    return found if batch.hidden is None else [*found, hidden_states(group, batch.number, 0, batch.hidden)]


def offered(message: Message, layers: int) -> tuple[list[list[int]], int]:
    """Return the prompts, as token ids, in the first message of ``offer``, and how many of the ``layers`` have run.

    Raises EngineError for anything else.
    """
    try:
        values = message.values()
        found = [[int(token) for token in prompt] for prompt in values["prompts"]]
        done = int(values.get("done", 0))
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise EngineError(f"an offered batch could not be read: {error!r}") from None
    if not found or not all(found):
        raise EngineError("expected prompts in an offered batch, found none")
    if not 0 <= done < layers:
        raise EngineError(f"expected an offered batch of which fewer than {layers} layers have run, found {done}")
    return found, done


def send_cache(channel: Channel, group: int, number: int, cache: Tensor) -> None:
    """Send the keys and values [layers, 2, tokens, kv_heads, head_dim] of a batch's next prompt or layers."""
    flat = cache.flatten(3).flatten(0, 2)
    dtype = DTYPES.index(str(cache.dtype).removeprefix("torch."))
    channel.send(Message(Kind.BLOCK, group, number, 1, dtype, flat.shape[0], flat.shape[1], buffer_of(flat)))


def send_handover(
    channel: Channel, group: int, number: int, parts: list[int], lengths: list[int], hidden: Tensor | None
) -> None:
    """Send the end of a handover, after the batch's keys and values.

    ``parts``: the keys and values came in parts of so many layers, each for every prompt. ``lengths``: the prompts'
    lengths in tokens.
    """
    channel.send(json_message(Kind.HANDOVER, group, {"parts": parts, "lengths": lengths}, step=number))
    if hidden is not None:
        channel.send(hidden_states(group, number, 1, hidden))


class HandoverReader:
    """A reader that joins messages into handovers. Keys and values of several batches may arrive interleaved.

    ``batches`` returns the offered batch of a number, or None. So a peer cannot make the reader keep more than it was
    offered.
    """

    def __init__(self, batches: Callable[[int], Batch | None]) -> None:
        self._batches = batches
        self._heads: dict[int, dict[str, Any]] = {}
        self._blocks: dict[int, list[Tensor]] = {}

    def take(self, message: Message, cache: KvCache) -> Handover | None:
        """Take the next message. Return the handover if that completes one, else None. Raises EngineError."""
        number = message.step
        batch = self._batches(number)
        if batch is None:
            raise EngineError(f"expected a batch that was offered, found number {number}")
        if message.kind is Kind.BLOCK:
            self._keep(number, message.tensor(), batch.lengths, cache.shape)
            return None
        if message.kind is Kind.HANDOVER:
            head = message.values()
            if not head.get("parts"):
                return Handover(number, 0, None, [])
            self._heads[number] = head
            return None
        head, blocks = self._heads.pop(number, {}), self._blocks.pop(number, [])
        try:
            return _put_together(message, head, blocks, cache, batch.done)
        except (OverflowError, RuntimeError, TypeError, ValueError) as error:
            raise EngineError(f"a batch that was handed over could not be read: {error}") from None

    def _keep(self, number: int, block: Tensor, lengths: list[int], shape: KvShape) -> None:
        blocks = self._blocks.setdefault(number, [])
        kept = sum(one.numel() for one in blocks) + block.numel()
        most = shape.layers * 2 * sum(lengths) * shape.kv_heads * shape.head_dim
        if len(blocks) == shape.layers * len(lengths) or kept > most:
            raise EngineError(f"expected the keys and values of {sum(lengths)} tokens in a batch, found more")
        blocks.append(block)


def _put_together(message: Message, head: dict[str, Any], blocks: list[Tensor], cache: KvCache, done: int) -> Handover:
    parts, lengths = [int(part) for part in head.get("parts", ())], [int(one) for one in head.get("lengths", ())]
    if not parts or len(blocks) != len(parts) * len(lengths):
        raise EngineError("expected the keys and values of every prompt of a batch, found others")
    if min(*parts, *lengths) < 1 or done + sum(parts) > cache.shape.layers:
        raise EngineError(f"expected a batch of up to {cache.shape.layers} layers and of prompts, found another")
    kv_heads, head_dim = cache.shape.kv_heads, cache.shape.head_dim
    if any(block.dtype != cache.shape.dtype for block in blocks):
        raise EngineError(f"expected keys and values of {cache.shape.dtype} in a batch, found others")
    rest = iter(blocks)
    caches: list[list[Tensor]] = [[] for _ in lengths]
    for part in parts:
        for prompt, length in enumerate(lengths):
            caches[prompt].append(next(rest).view(part, 2, length, kv_heads, head_dim))
    hidden = message.tensor()
    if hidden.shape[0] != sum(lengths):
        raise EngineError(f"expected the hidden states of {sum(lengths)} tokens, found those of {hidden.shape[0]}")
    return Handover(message.step, done + sum(parts), hidden, caches)


def read_in(cache: KvCache, sequence: Sequence, parts: list[Tensor], first: int = 0) -> None:
    """Write the keys and values of a sequence's layers from ``first`` on, given in parts in order, into its blocks."""
    device = cache.pool.device
    whole = parts[0].shape[2] // BLOCK_TOKENS
    numbers = torch.tensor(sequence.blocks[:whole], dtype=torch.long).to(device)  # empty for a short prompt
    if device.type != "cpu":
        parts = [torch.cat(parts).to(device)]  # one copy to the device
    for kv in parts:
        last = first + kv.shape[0]
        head, rest = kv[:, :, : whole * BLOCK_TOKENS], kv[:, :, whole * BLOCK_TOKENS :]
        cache.pool[first:last].index_copy_(
            2, numbers, head.reshape(*head.shape[:2], whole, BLOCK_TOKENS, *head.shape[3:])
        )
        if rest.shape[2]:
            cache.pool[first:last, :, sequence.blocks[whole], : rest.shape[2]] = rest
        first = last


def read_out(cache: KvCache, blocks: list[int], tokens: int, start: int, stop: int) -> Tensor:
    """Return a copy of a prompt's keys and values in layers [start, stop), in the host's memory.

    Shape [layers, 2, tokens, kv_heads, head_dim].
    """
    numbers = torch.tensor(blocks).to(cache.pool.device)
    return on_host(cache.pool[start:stop, :, numbers].flatten(2, 3)[:, :, :tokens].contiguous())


__all__ = [
    "BATCH_TOKENS",
    "Batch",
    "Handover",
    "HandoverReader",
    "grouped",
    "offer",
    "offered",
    "read_in",
    "read_out",
    "send_cache",
    "send_handover",
]
