"""Products with quantized weights: the same bits as with the floats that they stand for."""

from __future__ import annotations

import copy
import ctypes
import io
import itertools
import mmap
from collections.abc import Callable
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from medusa_runtime import kernels
from medusa_runtime.kernels import native, quantized
from medusa_runtime.load.quantized import codes
from medusa_runtime.load.quantized.codes import Codes
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def integers(rows: int, columns: int, low: int, high: int) -> Tensor:
    return torch.randint(low, high, (rows, columns), generator=torch.Generator().manual_seed(rows + columns))


def words(rows: int, columns: int) -> Tensor:
    return integers(rows, columns, -(1 << 31), 1 << 31).int()


def fractions(rows: int, columns: int) -> Tensor:
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows * columns)) / 64


def zeros(rows: int, columns: int, bits: int = 4) -> Tensor:
    return integers(rows, columns, 0, 1 << bits).to(torch.uint8)


def eights(rows: int, columns: int) -> Tensor:
    """Floats of 8 bits: all of them but NaN."""
    found = integers(rows, columns, 0, 256)
    return found.where(found % 128 < 127, 0).to(torch.uint8).view(torch.float8_e4m3fn)


def exponents(rows: int, columns: int) -> Tensor:
    """Scales of E8M0: powers of two."""
    return integers(rows, columns, 118, 126).to(torch.uint8).view(torch.float8_e8m0fnu)


# Each makes a weight [out, in] with in >= 64: groups that are whole vectors, groups that are not, and whole rows.
FORMS: dict[str, Callable[[int, int], Codes]] = {
    "int8": lambda rows, columns: Codes(integers(rows, columns, -128, 128).char(), fractions(rows, 1)),
    "int8-tensor": lambda rows, columns: Codes(integers(rows, columns, -128, 128).char(), fractions(1, 1)),
    "int8-zeros": lambda rows, columns: Codes(
        integers(rows, columns, -128, 128).char(), fractions(rows, columns // 8), integers(rows, columns // 8, -9, 9)
    ),
    "bytes": lambda rows, columns: Codes(
        words(rows, columns // 4), fractions(rows, columns // 32), torch.full((1, 1), 128.0), "across", 8
    ),
    "nibbles": lambda rows, columns: Codes(
        words(rows, columns // 8), fractions(rows, columns // 32), torch.full((1, 1), 8.0), "across", 4
    ),
    "nibbles-fp16": lambda rows, columns: Codes(
        words(rows, columns // 8), fractions(rows, columns // 32).half(), zeros(rows, columns // 32), "across", 4
    ),
    "nibbles-bf16": lambda rows, columns: Codes(
        words(rows, columns // 8), fractions(rows, columns // 32).bfloat16(), torch.full((1, 1), 8.0), "across", 4
    ),
    "nibbles-rows": lambda rows, columns: Codes(
        words(rows, columns // 8), fractions(rows, 1), zeros(rows, 1), "across", 4
    ),
    "nibbles-small-groups": lambda rows, columns: Codes(
        words(rows, columns // 8), fractions(rows, columns // 8), zeros(rows, columns // 8), "across", 4
    ),
    "fp8": lambda rows, columns: Codes(eights(rows, columns), fractions(rows, 1)),
    "fp8-squares": lambda rows, columns: Codes(
        eights(rows, columns), fractions(-(-rows // 16), -(-columns // 32)) - 1 / 128, block=(16, 32)
    ),
    "fp8-zeros": lambda rows, columns: Codes(
        eights(rows, columns), fractions(rows, columns // 32), integers(rows, columns // 32, -9, 9)
    ),
    "fp8-blocks": lambda rows, columns: Codes(
        eights(rows, columns), fractions(-(-rows // 48), -(-columns // 40)), block=(48, 40)
    ),
    "fp8-e5m2": lambda rows, columns: Codes(
        (integers(rows, columns, 0, 120)).to(torch.uint8).view(torch.float8_e5m2), fractions(rows, 1)
    ),
    "mxfp4": lambda rows, columns: Codes(
        integers(rows, columns // 2, 0, 256).to(torch.uint8), exponents(rows, columns // 32), None, "e2m1", 4
    ),
    "gptq": lambda rows, columns: Codes(
        words(columns // 8, rows), fractions(columns // 32, rows), zeros(columns // 32, rows), "down", 4,
        transposed=True,
    ),
    "gptq-8": lambda rows, columns: Codes(
        words(columns // 4, rows), fractions(1, rows), zeros(1, rows, 8), "down", 8, transposed=True
    ),
    "awq": lambda rows, columns: Codes(
        words(columns, rows // 8), fractions(columns // 32, rows), zeros(columns // 32, rows), "interleaved", 4,
        transposed=True,
    ),
}  # fmt: skip


@pytest.fixture
def used(compiled: native.NativeKernels, monkeypatch: pytest.MonkeyPatch) -> native.NativeKernels:
    """The kernels of one instruction set, for all of this process."""
    for module in (codes, kernels, quantized):
        monkeypatch.setattr(module, "native_kernels", lambda: compiled)
    return compiled


def kept(made: Codes) -> Tensor:
    found = made.kept(torch.float32)
    assert found is not None
    return found


def floats_of(made: Codes) -> Tensor:
    """The floats as torch computes them."""
    floats = torch.empty(made.shape[::-1] if made.transposed else made.shape)
    made._by_torch(floats)
    return floats


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_product_has_the_bits_of_one_with_the_floats(
    used: native.NativeKernels, form: str, dtype: torch.dtype
) -> None:
    for cols, depth in ((40, 64), (96, 2080), (104, 4192)):
        made = FORMS[form](cols, depth)
        weight, floats = kept(made), floats_of(made)
        bias = torch.randn(cols).to(dtype)
        for rows in (1, 2, 5, 8, 9, 40, 300):
            x = torch.randn(rows, depth).to(dtype)
            found = used.products(x, (weight,), (bias,))
            if used.bf16_dots and dtype is torch.bfloat16:
                expected = used.linear(x, floats.to(dtype), bias)
            else:
                expected = used.linear(x.float(), floats, bias.float()).to(dtype)
            assert torch.equal(found, expected), (cols, depth, rows)


def test_every_value_and_scale_of_mxfp4(used: native.NativeKernels) -> None:
    scale = torch.arange(255, dtype=torch.uint8).view(torch.float8_e8m0fnu).unsqueeze(1)
    stored = torch.arange(16, dtype=torch.uint8).mul(17).repeat(255, 1)  # each nibble twice
    floats = kept(Codes(stored, scale, None, "e2m1", 4))
    values = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    expected = torch.cat((values, -values)).repeat_interleave(2) * torch.arange(-127.0, 128).exp2().unsqueeze(1)
    assert torch.equal(floats + 0, expected.float())
    assert torch.equal(Codes(stored, scale, None, "e2m1", 4).dequantize(torch.float32), expected.float())


def test_columns_that_end_within_a_vector(used: native.NativeKernels) -> None:
    made = Codes(integers(50, 1037, -128, 128).char(), fractions(50, 1))
    x = torch.randn(3, 1037)
    assert torch.equal(used.products(x, (kept(made),), (None,)), used.linear(x, floats_of(made), None))


def test_several_weights_at_once_are_each_alone(used: native.NativeKernels) -> None:
    weights = [kept(FORMS[form](cols, 2080)) for form, cols in (("nibbles", 40), ("int8", 200), ("gptq", 8))]
    bias = torch.randn(200).bfloat16()
    for rows in (1, 9, 300):
        x = torch.randn(rows, 2080).bfloat16()
        found = used.products(x, weights, (None, bias, None))
        alone = [used.products(x, (weight,), (each,)) for weight, each in zip(weights, (None, bias, None), strict=True)]
        assert torch.equal(found, torch.cat(alone, 1))


def at_the_end_of_memory(values: Tensor) -> tuple[Tensor, mmap.mmap]:
    """A copy in read-only memory that ends where it ends: a byte read further, or a write, would kill this process."""
    page = mmap.PAGESIZE
    pages = -(-values.nbytes // page)
    memory = mmap.mmap(-1, (pages + 1) * page)
    place = torch.frombuffer(memory, dtype=torch.uint8, count=pages * page)[pages * page - values.nbytes :]
    place.copy_(values.view(torch.uint8).flatten())
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    end = place.data_ptr() + values.nbytes
    assert protect(end - pages * page, pages * page, mmap.PROT_READ) == 0
    assert protect(end, page, 0) == 0
    return place.view(values.dtype).view(values.shape), memory


@pytest.mark.parametrize("form", ["nibbles", "nibbles-fp16", "nibbles-bf16", "int8", "fp8", "mxfp4"])
def test_codes_and_scales_at_the_end_of_read_only_memory(used: native.NativeKernels, form: str) -> None:
    for cols, depth in ((8, 1024), (12, 1120)):
        made = FORMS[form](cols, depth)
        stored, scale = at_the_end_of_memory(made.stored), at_the_end_of_memory(made.scale)
        there = kept(made._replace(stored=stored[0], scale=scale[0]))
        for rows, dtype in itertools.product((1, 2, 20), DTYPES):
            x = torch.randn(rows, depth).to(dtype)
            assert torch.equal(used.products(x, (there,), (None,)), used.products(x, (kept(made),), (None,)))


def test_scales_are_not_copied(used: native.NativeKernels) -> None:
    for form in ("nibbles", "nibbles-fp16", "nibbles-bf16", "int8", "fp8", "mxfp4"):
        made = FORMS[form](8, 1024)
        weight = kept(made)
        made.stored.view(torch.uint8).fill_(0x12)
        made.scale.copy_(torch.ones(made.scale.shape))
        x = torch.randn(2, 1024)
        assert torch.equal(used.products(x, (weight,), (None,)), used.linear(x, floats_of(made), None))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["nibbles", "nibbles-rows", "int8-zeros", "fp8-blocks", "int8-tensor", "mxfp4"])
def test_torch_multiplies_what_is_not_ours(form: str, dtype: torch.dtype) -> None:
    """Many rows where torch is faster, other strides, gradients: with the floats of a slice at a time."""
    if isinstance(kernels.native_kernels(), str):
        pytest.skip("no compiled kernels")
    made = FORMS[form](1104, 128)
    weight, floats = kept(made), floats_of(made).to(dtype)
    x, bias = torch.randn(2, 70, 128).to(dtype), torch.randn(1104).to(dtype)
    expected = F.linear(x, floats, bias)
    rounding = 0.005 * expected.abs().max().item()  # of weights: where our kernel takes these rows, it does without
    torch.testing.assert_close(kernels.linear(x, weight, bias), expected, rtol=0.02, atol=max(rounding, 0.02))
    transposed = torch.randn(128, 3).to(dtype).t()
    torch.testing.assert_close(kernels.linear(transposed, weight), F.linear(transposed, floats), rtol=0.02, atol=0.02)
    trained = torch.randn(3, 128).to(dtype).requires_grad_()
    kernels.linear(trained, weight).sum().backward()  # type: ignore[no-untyped-call]
    assert trained.grad is not None
    torch.testing.assert_close(trained.grad, floats.float().sum(0).to(dtype).expand(3, -1), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("form", ["nibbles", "fp8-blocks", "int8-tensor"])
def test_never_are_all_floats_there_at_once(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = kernels.native_kernels()
    if isinstance(found, str):
        pytest.skip("no compiled kernels")
    sizes: list[int] = []
    dequantize = found.dequantize
    monkeypatch.setattr(
        found, "dequantize", lambda codes, out, **at: [sizes.append(len(out)), dequantize(codes, out, **at)]
    )
    weight = kept(FORMS[form](2500, 128))
    kernels.linear(torch.randn(140, 128), weight)
    assert sum(sizes) == 2500
    assert max(sizes) < 1200


def test_to_other_code_it_is_a_parameter_of_floats() -> None:
    if isinstance(kernels.native_kernels(), str):
        pytest.skip("no compiled kernels")
    made = FORMS["nibbles"](40, 64)
    weight, floats = kept(made), floats_of(made)
    assert weight.size(dim=1) == 64
    module = torch.nn.Linear(64, 40, bias=False)
    module.weight = cast("torch.nn.Parameter", weight)
    copied = copy.deepcopy(module)
    assert type(copied.weight) is quantized.QuantizedParameter
    assert torch.equal(copied.weight, floats)
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded.weight) is torch.nn.Parameter
    assert torch.equal(loaded.weight, floats)
    assert torch.equal(module.state_dict()["weight"], floats)
    for change in (weight.zero_, lambda: weight.copy_(floats), lambda: weight.__setitem__(0, 1.0)):
        with pytest.raises(RuntimeError, match="would change a weight that stays quantized"):
            change()


def test_quantized_and_plain_weights_of_one_input() -> None:
    if isinstance(kernels.native_kernels(), str):
        pytest.skip("no compiled kernels")
    made = FORMS["nibbles"](40, 64)
    x, plain = torch.randn(3, 64).bfloat16(), torch.randn(16, 64).bfloat16()
    with torch.inference_mode():
        first, other = kernels.linears(x, [kept(made), plain], [None, None])
        assert torch.equal(first, kernels.linear(x, kept(made)))
        assert torch.equal(other, kernels.linear(x, plain))
        both = kernels.concatenated_linear(x, [kept(made), plain], [None, None])
        assert torch.equal(both, torch.cat([first, other], -1))
        residual = torch.randn(3, 40).bfloat16()
        assert torch.equal(kernels.linear(x, kept(made), None, residual), residual + first)


@pytest.mark.parametrize("form", ["gptq", "gptq-8"])
def test_columns_of_a_group_that_lie_apart(used: native.NativeKernels, form: str) -> None:
    made = FORMS[form](40, 2080)
    groups = made.scale.shape[0]
    made = made._replace(group_of=(torch.arange(2080) // (2080 // groups))[torch.randperm(2080)])
    weight, floats = kept(made), floats_of(made)
    order = made.group_of.argsort(stable=True)  # type: ignore[union-attr]
    assert torch.equal(weight + 0, floats)
    for rows in (1, 40):
        x = torch.randn(rows, 2080)
        with torch.inference_mode():
            for found in (kernels.linear(x, weight), kernels.linears(x, [weight, weight], [None, None])[1]):
                torch.testing.assert_close(found, F.linear(x, floats), rtol=1e-3, atol=1e-3)
        assert torch.equal(
            used.products(x[:, order], (weight,), (None,)),
            used.linear(x[:, order], floats[:, order].contiguous(), None),
        )


def test_what_no_kernel_multiplies_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made = FORMS["nibbles"](40, 64)
    apart = torch.arange(64) % 2
    assert made._replace(group_of=apart).kept(torch.float32) is None
    unequal = FORMS["gptq"](40, 64)._replace(group_of=apart.where(torch.arange(64) > 0, 1))
    assert unequal.kept(torch.float32) is None
    assert Codes(words(8, 4), fractions(8, 1), None, "across", 2).kept(torch.float32) is None
    assert Codes(words(8, 4), fractions(8, 1)).kept(torch.float32) is None
    monkeypatch.setattr(codes, "native_kernels", lambda: "no compiled kernel")
    assert made.kept(torch.float32) is None


def test_a_float_of_8_bits_that_is_not_a_number(used: native.NativeKernels) -> None:
    values = eights(8, 64).view(torch.uint8)
    values[2, 40], values[7, 3] = 0x7F, 0xFF
    weight = kept(Codes(values.view(torch.float8_e4m3fn), fractions(8, 1)))
    for rows, dtype in itertools.product((1, 20), DTYPES):
        found = used.products(torch.rand(rows, 64).to(dtype), (weight,), (None,))
        assert found.isnan().nonzero()[:, 1].tolist() == [2, 7] * rows


def test_each_float_of_8_bits(used: native.NativeKernels) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(1, 256).view(torch.float8_e4m3fn)
    found = Codes(every, torch.tensor([[0.5]])).dequantize(torch.float32)
    assert torch.equal(found.nan_to_num(-1.0), (every.float() * 0.5).nan_to_num(-1.0))
    assert found.isnan().sum() == 2
