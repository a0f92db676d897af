"""Random weights in ggml's blocks."""

from __future__ import annotations

import torch
from medusa_runtime.checkpoint.gguf.blocks import BLOCKS
from medusa_runtime.load.quantized.block_codes import BlockCodes
from torch import Tensor

# Where the fp16 numbers of a block are, in bytes. MXFP4 has an exponent in its first byte.
HALVES = {
    "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,),
    "MXFP4": (),
}  # fmt: skip


def random_bytes(kind: str, rows: int, blocks: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows + blocks)
    return torch.randint(0, 256, (rows, blocks * BLOCKS[kind].size_bytes), generator=generator).to(torch.uint8)


def usual(kind: str, rows: int, columns: int) -> BlockCodes:
    """Random blocks whose scales are those of a weight."""
    blocks = columns // BLOCKS[kind].values
    stored = random_bytes(kind, rows, blocks)
    each = stored.view(rows * blocks, -1)
    generator = torch.Generator().manual_seed(columns)
    for place in HALVES.get(kind, (0,)):
        scales = torch.rand(len(each), 1, generator=generator).half() / 64 - 1 / 128
        each[:, place : place + 2] = scales.view(torch.uint8)
    if kind == "MXFP4":
        each[:, 0] = each[:, 0] % 8 + 118
    return BlockCodes(stored, kind)


def floats_of(codes: BlockCodes) -> Tensor:
    """The floats as torch computes them."""
    floats = torch.empty(codes.shape)
    codes._by_torch(floats)
    return floats


def kept(codes: BlockCodes) -> Tensor:
    found = codes.kept(torch.float32)
    assert found is not None
    return found
