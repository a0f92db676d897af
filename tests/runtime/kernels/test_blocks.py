"""ggml's blocks: the floats that gguf-py makes of them, and products in fp32, which are those with these floats."""

from __future__ import annotations

import ctypes
import itertools
import mmap
from typing import Any

import pytest
import torch
from ggml_blocks import floats_of, kept, random_bytes, usual
from medusa_runtime.checkpoint.gguf.blocks import BLOCKS
from medusa_runtime.kernels import native
from medusa_runtime.load.quantized import block_codes
from medusa_runtime.load.quantized.block_codes import BlockCodes
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def same(found: Tensor, expected: Tensor) -> bool:
    """Whether all floats are equal, and those are not numbers that should not be."""
    return torch.equal(found.isnan(), expected.isnan()) and torch.equal(
        found.nan_to_num(0, torch.inf, -torch.inf), expected.nan_to_num(0, torch.inf, -torch.inf)
    )


@pytest.mark.parametrize("kind", BLOCKS)
def test_floats_are_those_of_gguf(used: native.NativeKernels, kind: str) -> None:
    import numpy as np
    from gguf import GGMLQuantizationType, dequantize

    for stored in (random_bytes(kind, 301, 3), usual(kind, 33, 2 * BLOCKS[kind].values).stored):
        with np.errstate(all="ignore"):  # scales that are infinite, or not numbers
            expected = torch.from_numpy(dequantize(stored.numpy(), GGMLQuantizationType[kind]))
        codes = BlockCodes(stored, kind)
        assert codes.shape == expected.shape
        assert same(codes.dequantize(torch.float32), expected)
        assert same(floats_of(codes), expected)
        for dtype in DTYPES:
            assert same(codes.dequantize(dtype), expected.to(dtype))


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_product_has_the_bits_of_one_with_the_floats(used: native.NativeKernels, kind: str) -> None:
    several = (*range(1, 18), 40)
    for cols, columns, counts in ((1, BLOCKS[kind].values, several), (40, 768, several), (97, 4352, (1, 4, 9, 300))):
        codes = usual(kind, cols, columns)
        weight, floats, bias = kept(codes), floats_of(codes), torch.randn(cols)
        for rows in counts:
            x = torch.randn(rows, columns)
            assert torch.equal(used.products(x, (weight,), (bias,)), used.linear(x, floats, bias)), (
                cols,
                columns,
                rows,
            )


@pytest.mark.parametrize("kind", BLOCKS)
def test_many_rows_in_bf16_with_dot_products_of_it(used: native.NativeKernels, kind: str) -> None:
    if not used.bf16_dots:
        pytest.skip("without them, all rows are rounded to 8 bits")
    codes, x, bias = usual(kind, 40, 768), torch.randn(33, 768).bfloat16(), torch.randn(40).bfloat16()
    found = used.products(x, (kept(codes),), (bias,))
    assert torch.equal(found, used.linear(x, floats_of(codes).bfloat16(), bias))


def before_the_end_of_memory(values: Tensor) -> tuple[Tensor, mmap.mmap]:
    """A copy in read-only memory that ends where it ends: a byte read further would kill this process."""
    pages = -(-values.nbytes // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    place = torch.frombuffer(memory, dtype=torch.uint8, count=pages * mmap.PAGESIZE)[-values.nbytes :]
    place.copy_(values.flatten())
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    end = place.data_ptr() + values.nbytes
    assert protect(end - pages * mmap.PAGESIZE, pages * mmap.PAGESIZE, mmap.PROT_READ) == 0
    assert protect(end, mmap.PAGESIZE, 0) == 0
    return place.view(values.shape), memory


@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_at_the_end_of_read_only_memory(used: native.NativeKernels, kind: str) -> None:
    for cols, columns in ((13, 1024), (6, 256)):  # the first of them begins at an odd address in many formats
        codes = usual(kind, cols, columns)
        stored, _memory = before_the_end_of_memory(codes.stored)
        there = codes._replace(stored=stored)
        weight: Any = kept(there)
        assert weight.codes._struct.values == stored.data_ptr()  # no copy
        assert torch.equal(there.dequantize(torch.float32), floats_of(codes))
        for rows, dtype in itertools.product((1, 2, 20), DTYPES):
            x = torch.randn(rows, columns).to(dtype)
            assert torch.equal(used.products(x, (weight,), (None,)), used.products(x, (kept(codes),), (None,)))


def test_it_begins_at_any_address(used: native.NativeKernels) -> None:
    for kind in BLOCKS:
        codes = usual(kind, 5, 512)
        memory = torch.empty(codes.stored.nbytes + 1, dtype=torch.uint8)
        memory[1:] = codes.stored.flatten()
        moved = codes._replace(stored=memory[1:].view(codes.stored.shape))
        for dtype in DTYPES:
            x = torch.randn(3, 512).to(dtype)
            assert torch.equal(used.products(x, (kept(moved),), (None,)), used.products(x, (kept(codes),), (None,)))


def test_several_formats_at_once_are_each_alone(used: native.NativeKernels) -> None:
    weights = [kept(usual(kind, 7, 2048)) for kind in BLOCKS]
    for rows in (1, 9):
        x = torch.randn(rows, 2048).bfloat16()
        found = used.products(x, weights, [None] * len(weights))
        assert torch.equal(found, torch.cat([used.products(x, (weight,), (None,)) for weight in weights], 1))


def test_scales_that_are_no_numbers_spoil_their_rows_only(used: native.NativeKernels) -> None:
    for bits in (0x7C00, 0xFC00, 0x7E00, 0x7BFF, 0x0001):
        codes = usual("Q4_K", 8, 512)
        codes.stored[2, 0], codes.stored[2, 1] = bits & 255, bits >> 8
        for rows, dtype in itertools.product((1, 20), (torch.float32, torch.bfloat16)):
            found = used.products(torch.rand(rows, 512).to(dtype), (kept(codes),), (None,))
            assert found[:, 3:].isfinite().all()
            assert found[:, 2].isfinite().all() == (bits in (0x7BFF, 1))


def test_rows_of_a_slice(used: native.NativeKernels) -> None:
    codes = usual("Q6_K", 40, 512)
    out = torch.empty(7, 512)
    used.dequantize(kept(codes).codes, out, first_row=11)  # type: ignore[attr-defined]
    assert torch.equal(out, floats_of(codes)[11:18])


@pytest.mark.parametrize("kind", BLOCKS)
def test_without_kernels_they_become_floats(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = usual(kind, 3, 512)
    expected = codes.dequantize(torch.bfloat16)
    monkeypatch.setattr(block_codes, "native_kernels", lambda: "no compiled kernel")
    assert codes.kept(torch.bfloat16) is None
    assert torch.equal(codes.dequantize(torch.bfloat16), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gathered_rows(used: native.NativeKernels, dtype: torch.dtype) -> None:
    codes = usual("Q4_K", 50, 2048)
    stored: Any = kept(codes)
    for places in ([0], [49, 3, 3], list(range(50)) * 3, []):
        out = torch.empty(len(places), 2048, dtype=dtype)
        used.gather(stored.codes, torch.tensor(places, dtype=torch.int64), out)
        assert torch.equal(out, floats_of(codes).to(dtype)[places])
    for place in (-1, 50, 1 << 40):
        with pytest.raises(IndexError, match=f"expected rows from 0 to 49, found {place}"):
            used.gather(stored.codes, torch.tensor([3, place]), torch.empty(2, 2048, dtype=dtype))
