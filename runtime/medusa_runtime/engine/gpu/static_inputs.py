"""The memory that captured graphs read and write, at fixed addresses. Each batch uses its first rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..serving.sequence import Span
from ..torch.kv_cache import BLOCK_TOKENS, SPARE_BLOCKS, Memory

INPUTS, OUTPUTS = "graph inputs", "graph outputs"  # the names of their memory


class StaticInputs:
    """Token ids, positions, slots, contexts and block tables of up to ``rows`` sequences, and their logits.

    A batch that is smaller than its graph is padded with rows whose results are not used. Such a row is token 0 at
    position 0 of a sequence of one token in ``spare``, a block that belongs to no sequence.
    """

    def __init__(
        self,
        memory: Memory,
        device: torch.device,
        *,
        rows: int,
        blocks: int,
        vocab: int,
        dtype: torch.dtype,
        spare: int,
    ) -> None:
        """Allocate inputs and outputs. ``blocks``: the most that a sequence can have. ``dtype``: that of the logits."""
        self.rows = rows
        self._spare = spare
        numbers, tables = rows * 4 * 8, rows * blocks * 4
        inputs = memory(INPUTS, numbers + tables)
        self.numbers = inputs[:numbers].view(torch.long).view(4, rows)
        self.tables = inputs[numbers : numbers + tables].view(torch.int32).view(rows, blocks)
        self.logits = memory(OUTPUTS, rows * vocab * dtype.itemsize)[: rows * vocab * dtype.itemsize]
        self.logits = self.logits.view(dtype).view(rows, vocab)
        pinned = device.type == "cuda"
        self._host_numbers = torch.zeros((4, rows), dtype=torch.long, pin_memory=pinned)
        self._host_tables = torch.zeros((rows, blocks), dtype=torch.int32, pin_memory=pinned)
        self.fill([], rows)

    @property
    def token_ids(self) -> Tensor:
        return self.numbers[0]

    @property
    def positions(self) -> Tensor:
        return self.numbers[1]

    @property
    def slots(self) -> Tensor:
        return self.numbers[2]

    @property
    def contexts(self) -> Tensor:
        return self.numbers[3]

    @property
    def distinct_rows(self) -> int:
        """How many different rows ``fill_reference`` makes before they repeat."""
        return SPARE_BLOCKS

    def fill_reference(self, size: int, vocab: int) -> None:
        """Fill rows whose results depend only on the weights: first tokens, of ``distinct_rows`` kinds."""
        kind = torch.arange(size) % self.distinct_rows
        blocks = self._spare + kind
        self._host_numbers[:, :size] = torch.stack(
            [kind * 37 % vocab, torch.zeros_like(kind), blocks * BLOCK_TOKENS, torch.ones_like(kind)]
        )
        self._host_tables[:size] = blocks[:, None].to(torch.int32)
        self._copy_to_device(size)

    def pieces(self, size: int) -> list[tuple[int, bytes]]:
        """Return what the last fill wrote, as pairs of an offset in the memory of the inputs and bytes."""
        rows = [(row * self.numbers.shape[1] * 8, self._host_numbers[row, :size]) for row in range(4)]
        parts = [*rows, (self.numbers.nbytes, self._host_tables[:size])]
        return [(offset, bytes(part.contiguous().view(-1).view(torch.uint8).tolist())) for offset, part in parts]

    def fill(self, spans: Sequence[Span], size: int) -> None:
        """Write these spans, each with a sequence's last token, and pad them to ``size`` rows.

        The copies run in the order of the current stream. Call this only when the data of the last fill has been used.
        """
        padding = size - len(spans)
        ids = [span.sequence.tokens[span.start] for span in spans]
        starts = [span.start for span in spans]
        slots = [span.sequence.slots(span.start, span.stop)[0] for span in spans]
        rows = torch.tensor(
            [
                ids + [0] * padding,
                starts + [0] * padding,
                slots + [self._spare * BLOCK_TOKENS] * padding,
                [start + 1 for start in starts] + [1] * padding,
            ]
        )
        self._host_numbers[:, :size] = rows
        width = max((len(span.sequence.blocks) for span in spans), default=1)
        tables = [[*span.sequence.blocks, *[self._spare] * (width - len(span.sequence.blocks))] for span in spans]
        tables += [[self._spare] * width] * padding
        self._host_tables[:size, :width] = torch.tensor(tables, dtype=torch.int32)
        self._copy_to_device(size)

    def _copy_to_device(self, size: int) -> None:
        self.numbers.copy_(self._host_numbers, non_blocking=True)
        self.tables[:size].copy_(self._host_tables[:size], non_blocking=True)
