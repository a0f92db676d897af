"""Embeddings whose table stays quantized: only the rows that a step needs become floats."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from medusa_runtime import kernels
from medusa_runtime.kernels import native
from medusa_runtime.load.applier import Applier
from medusa_runtime.load.plan import places
from medusa_runtime.load.quantized.block_codes import BlockCodes
from medusa_runtime.load.quantized.codes import Codes
from medusa_runtime.load.trace import record_execution_order
from medusa_runtime.models.layers.embedding import Embedding
from medusa_runtime.models.layers.linear import Linear
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def found() -> native.NativeKernels:
    found = kernels.native_kernels()
    if isinstance(found, str):
        pytest.skip(found)
    return found


def blocks(rows: int) -> BlockCodes:
    stored = torch.randint(0, 256, (rows, 2, 18), generator=torch.Generator().manual_seed(rows)).to(torch.uint8)
    stored[:, :, :2] = torch.tensor(0.01, dtype=torch.float16).view(1).view(torch.uint8)
    return BlockCodes(stored.flatten(1), "Q4_0")


def integers(rows: int) -> Codes:
    values = torch.randint(-128, 128, (rows, 64), generator=torch.Generator().manual_seed(rows)).char()
    return Codes(values, torch.rand(rows, 2))


def scattered(rows: int) -> Codes:
    """Stored as columns, with the columns of a group apart."""
    words = torch.randint(-(1 << 31), 1 << 31, (8, rows), generator=torch.Generator().manual_seed(rows)).int()
    zero = torch.full((2, rows), 8, dtype=torch.uint8)
    return Codes(words, torch.rand(2, rows), zero, "down", 4, group_of=torch.arange(64) % 2, transposed=True)


def kept(codes: BlockCodes | Codes) -> nn.Parameter:
    made = codes.kept(torch.bfloat16)
    assert made is not None
    return made


@pytest.mark.parametrize("form", [blocks, integers, scattered])
def test_rows_are_those_of_the_floats(form: type, monkeypatch: pytest.MonkeyPatch, found: native.NativeKernels) -> None:
    codes = form(40)
    layer, floats = Embedding(40, 64, device="meta"), codes.dequantize(torch.bfloat16)
    layer.weight = kept(codes)
    monkeypatch.setattr(found, "dequantize", lambda *_: pytest.fail("all floats were made"))
    for ids in (torch.tensor([0, 39, 7, 7]), torch.tensor([[3], [5]]), torch.tensor(11), torch.tensor([], dtype=int)):
        for given in (ids, ids.int()):
            assert torch.equal(layer(given), F.embedding(given, floats))
    backwards = torch.arange(40)[::2]
    assert torch.equal(layer(backwards), floats[backwards])
    for wrong in (-1, 40):
        with pytest.raises(IndexError):
            layer(torch.tensor([0, wrong]))


def test_floats_are_gathered_by_torch() -> None:
    layer = Embedding(10, 4)
    layer.weight = nn.Parameter(torch.randn(10, 4))
    ids = torch.tensor([[1, 2], [3, 9]])
    assert torch.equal(layer(ids), F.embedding(ids, layer.weight))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unused = Linear(4, 4)
        self.head = Linear(64, 40, bias=False)
        self.embed = Embedding(40, 64)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.embed(ids)))


def test_a_tied_head_multiplies_with_the_codes() -> None:
    module, codes, ids = Tied(), blocks(40), torch.tensor([1, 39, 4])
    applier = Applier(module, dtype=torch.bfloat16)
    place = places(module)["embed.weight"]
    assert applier.takes_codes(place)
    assert not applier.apply(place, kept(codes))
    assert module.head.weight is module.embed.weight
    floats = codes.dequantize(torch.bfloat16)
    with torch.inference_mode():
        torch.testing.assert_close(module(ids), F.linear(floats[ids], floats), rtol=0.02, atol=0.02)


def test_its_use_is_noticed() -> None:
    layer = nn.ModuleDict({"other": Linear(4, 4), "embed": Embedding(40, 64)})
    layer["embed"].weight = kept(blocks(40))
    layer.forward = lambda ids: layer["embed"](ids)  # type: ignore[method-assign]
    assert record_execution_order(layer, torch.tensor([1]))[0] == "embed.weight"
