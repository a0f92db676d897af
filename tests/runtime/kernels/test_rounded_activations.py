"""Products of ggml's blocks with activations in bf16 or fp16, which are rounded to 8 bits."""

from __future__ import annotations

import pytest
import torch
from ggml_blocks import HALVES, floats_of, kept, usual
from medusa_runtime.checkpoint.gguf.blocks import BLOCKS
from medusa_runtime.kernels import native
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float16]


def rounded(x: Tensor, kind: str) -> Tensor:
    """x as ggml rounds it: each group's largest number becomes 127 or -127. A group has as many values as a block."""
    groups = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % BLOCKS[kind].values))
    groups = groups.view(len(x), -1, BLOCKS[kind].values)
    largest = groups.abs().amax(2, keepdim=True)
    integers = torch.where(largest > 0, groups * (torch.full_like(largest, 127) / largest), 0).round()
    return (integers.double() * (largest / 127).double()).view(len(x), -1)[:, : x.shape[1]]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", BLOCKS)
def test_products_are_those_of_rounded_activations(used: native.NativeKernels, kind: str) -> None:
    values = BLOCKS[kind].values
    for cols, columns in ((1, values), (40, 768), (97, 4352), (5, 2048 + values)):
        codes = usual(kind, cols, columns)
        weight, floats = kept(codes), floats_of(codes).double()
        for dtype in DTYPES:
            for rows in (1, 2, 3, 7, 8, 9, 17, 32):
                x, bias = torch.randn(rows, columns).to(dtype), torch.randn(cols).to(dtype)
                expected = rounded(x, kind) @ floats.t() + bias
                error = (used.products(x, (weight,), (bias,)) - expected).abs()
                limit = expected.abs() * torch.finfo(dtype).eps * 0.501 + expected.abs().max() * 4e-6
                assert (error <= limit).all(), (cols, columns, rows, dtype)


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_row_has_the_same_bits_in_every_batch(used: native.NativeKernels, kind: str, threads: None) -> None:
    weight = kept(usual(kind, 301, 2304))
    x, residual = torch.randn(300, 2304).bfloat16(), torch.randn(300, 301).bfloat16()
    alone = torch.cat(
        [used.products(row[None], (weight,), (None,), one[None]) for row, one in zip(x, residual, strict=True)]
    )
    for rows in (2, 3, 8, 11, 32, 300):
        if rows > 32 and used.bf16_dots:
            continue  # these are not rounded
        for first in (0, 300 - rows):
            some = slice(first, first + rows)
            assert torch.equal(used.products(x[some], (weight,), (None,), residual[some]), alone[some]), rows


def test_rows_may_be_apart(used: native.NativeKernels) -> None:
    x = torch.randn(5, 1000).half()[:, 100:868]
    weight = kept(usual("Q4_K", 7, 768))
    assert torch.equal(used.products(x, (weight,), (None,)), used.products(x.contiguous(), (weight,), (None,)))


@pytest.mark.parametrize("kind", BLOCKS)
def test_zeros(used: native.NativeKernels, kind: str) -> None:
    weight, bias = kept(usual(kind, 6, 512)), torch.randn(6).bfloat16()
    x = torch.zeros(3, 512).bfloat16()
    assert torch.equal(used.products(x, (weight,), (bias,)), bias.expand(3, 6))
    x[1, 300] = -(2.0**-126)  # too small to be rounded to a part of it
    assert torch.equal(used.products(x, (weight,), (bias,)), bias.expand(3, 6))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", BLOCKS)
def test_what_is_not_finite_spoils_its_row_only(used: native.NativeKernels, kind: str, dtype: torch.dtype) -> None:
    weight = kept(usual(kind, 6, 544 if BLOCKS[kind].values == 32 else 512))
    for value in (torch.nan, -torch.nan, torch.inf, -torch.inf):
        for column in (0, 300, weight.shape[1] - 1):
            x = torch.randn(11, weight.shape[1]).to(dtype)
            x[7, column] = value
            found = used.products(x, (weight,), (None,))
            assert found[7].isnan().all()
            assert found[torch.arange(11) != 7].isfinite().all()


def test_the_largest_and_the_smallest_activations(used: native.NativeKernels) -> None:
    for kind in ("Q4_K", "Q6_K", "Q8_0", "Q4_0", "Q4_1"):
        codes = usual(kind, 6, 512)
        x = torch.randn(2, 512).sign().bfloat16()
        ones = used.products(x, (kept(codes),), (None,))
        for power in (-90, 100):
            found = used.products(x * 2.0**power, (kept(codes),), (None,))
            assert torch.equal(found, ones * 2.0**power)


def test_integers_at_their_limits(used: native.NativeKernels) -> None:
    """All codes and all activations are the largest: sums of products must not overflow."""
    for kind, stored in (("Q8_0", 0x80), ("Q8_0", 0x7F), *((kind, 0xFF) for kind in BLOCKS if kind != "Q8_0")):
        codes = usual(kind, 3, 4096)
        scales = codes.stored.clone()
        codes.stored.fill_(stored)
        each, given = codes.stored.view(-1, BLOCKS[kind].size_bytes), scales.view(-1, BLOCKS[kind].size_bytes)
        for place in HALVES.get(kind, (0,)):
            each[:, place : place + 2] = given[:, place : place + 2]
        if kind == "MXFP4":
            each[:, 0] = given[:, 0]
        for sign in (1, -1):
            x = torch.full((9, 4096), 3.0 * sign).bfloat16()
            expected = x.double() @ floats_of(codes).double().t()
            found = used.products(x, (kept(codes),), (None,))
            torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", BLOCKS)
def test_rounding_is_finer_than_with_seven_bits(used: native.NativeKernels, kind: str) -> None:
    codes, x = usual(kind, 200, 2048), torch.randn(20, 2048).half()
    exact = x.double() @ floats_of(codes).double().t()
    error = (used.products(x, (kept(codes),), (None,)) - exact).norm() / exact.norm()
    assert error < 0.01
