"""The memory that captured graphs read: what lies where, and what a reference writes."""

from __future__ import annotations

import torch
from medusa_runtime.engine.gpu.placed_memory import tensor_at
from medusa_runtime.engine.gpu.static_inputs import StaticInputs
from medusa_runtime.engine.torch.kv_cache import BLOCK_TOKENS, SPARE_BLOCKS
from torch import Tensor


def make(memories: dict[str, Tensor]) -> StaticInputs:
    def memory(name: str, size_bytes: int) -> Tensor:
        memories[name] = torch.full((size_bytes,), 0xFF, dtype=torch.uint8)
        return memories[name]

    device = torch.device("cpu")
    return StaticInputs(memory, device, rows=40, blocks=6, vocab=100, dtype=torch.bfloat16, spare=7)


def test_a_reference_needs_nothing_but_weights() -> None:
    inputs = make({})
    inputs.fill_reference(40, 100)
    assert inputs.contexts.tolist() == [1] * 40
    assert inputs.positions.tolist() == [0] * 40
    blocks = inputs.slots // BLOCK_TOKENS
    assert set(blocks.tolist()) == set(range(7, 7 + SPARE_BLOCKS))
    assert (inputs.tables == blocks[:, None]).all()
    rows = list(zip(inputs.token_ids.tolist(), inputs.slots.tolist(), strict=True))
    assert len({slot for _, slot in rows}) == len(set(rows)) == inputs.distinct_rows, (
        "two tokens would write to one slot"
    )


def test_pieces_bring_a_fill_back() -> None:
    memories: dict[str, Tensor] = {}
    inputs = make(memories)
    inputs.fill_reference(24, 100)
    expected = inputs.numbers[:, :24].clone(), inputs.tables[:24].clone()
    pieces = inputs.pieces(24)
    memories["graph inputs"].fill_(0)
    for offset, data in pieces:
        memories["graph inputs"][offset : offset + len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    assert torch.equal(inputs.numbers[:, :24], expected[0])
    assert torch.equal(inputs.tables[:24], expected[1])


def test_a_tensor_over_memory_of_somebody_else() -> None:
    owner = torch.arange(32, dtype=torch.uint8)
    tensor = tensor_at(owner.data_ptr(), 32, owner.device)
    assert torch.equal(tensor, owner)
    tensor[3] = 77
    assert owner[3] == 77
