"""The compiled steps between the products against torch's operations, which round after each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from medusa_runtime import kernels
from medusa_runtime.kernels import native, pointwise
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
ROWS = [1, 3, 700]  # the last is spread over threads


@pytest.fixture(autouse=True)
def chosen(compiled: native.NativeKernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """``chosen(True)`` makes the dispatcher take the compiled kernels, ``chosen(False)`` torch."""

    def choose(take: bool) -> None:
        monkeypatch.setattr(pointwise, "native_kernels_for", lambda *tensors: compiled if take else None)

    with torch.inference_mode():
        yield choose


def made(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * 3).to(dtype)


def assert_alike(found: Tensor, expected: Tensor) -> None:
    """Equal, but for an fp32 sum or exp whose last bit decides a rounding here and there."""
    assert found.dtype is expected.dtype
    assert found.shape == expected.shape
    eps = torch.finfo(found.dtype).eps
    rounds = 8 if found.dtype is torch.float32 else 2.01
    torch.testing.assert_close(found, expected, rtol=rounds * eps, atol=eps / 8)
    if found.dtype is not torch.float32:
        assert float((found == expected).float().mean()) > 0.98


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("size", [8, 96, 2056])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm(chosen: Callable[[bool], None], dtype: torch.dtype, size: int, rows: int) -> None:
    wider, weight = made(rows, size + 8, dtype=dtype), made(size, dtype=dtype)
    for x in (wider[:, 8:].contiguous(), wider[:, 8:]):
        chosen(False)
        expected = kernels.rms_norm(x, weight, 1e-5)
        chosen(True)
        assert_alike(kernels.rms_norm(x, weight, 1e-5), expected)


@pytest.mark.parametrize(("once", "offset"), [(True, 0.0), (True, 1.0)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_rounded_once(chosen: Callable[[bool], None], dtype: torch.dtype, once: bool, offset: float) -> None:
    x, weight = made(2, 3, 96, dtype=dtype), made(96, dtype=dtype)
    chosen(False)
    expected = kernels.rms_norm(x, weight, 1e-5, once=once, offset=offset)
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, True) + 1e-5)
    assert_alike(expected, (wide * (weight.float() + offset)).to(dtype))
    chosen(True)
    assert_alike(kernels.rms_norm(x, weight, 1e-5, once=once, offset=offset), expected)


def test_rms_norm_of_heads_inside_a_wider_row(chosen: Callable[[bool], None]) -> None:
    x, weight = made(5, 200, dtype=torch.bfloat16)[:, 20:148].view(5, 4, 32), made(32, dtype=torch.bfloat16)
    chosen(False)
    expected = kernels.rms_norm(x, weight, 1e-6)
    chosen(True)
    assert_alike(kernels.rms_norm(x, weight, 1e-6), expected)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("head_dim", "size"), [(64, 64), (64, 32), (16, 16), (48, 16)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotate(chosen: Callable[[bool], None], dtype: torch.dtype, head_dim: int, size: int, rows: int) -> None:
    cos, sin = made(rows, 1, size, dtype=dtype), made(rows, 2, size, dtype=dtype)[:, :1].contiguous()

    def parts() -> tuple[Tensor, Tensor]:
        fused = made(rows, 7, head_dim, dtype=dtype)
        return fused[:, :5], fused[:, 5:]

    chosen(False)
    expected = kernels.rotate(*parts(), cos, sin)
    chosen(True)
    for found, each in zip(kernels.rotate(*parts(), cos, sin), expected, strict=True):
        # torch's addcmul fuses the last product into the sum, which shows in fp32 alone
        torch.testing.assert_close(found, each, rtol=0, atol=2e-5 if dtype is torch.float32 else 0)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_gate(chosen: Callable[[bool], None], dtype: torch.dtype, rows: int) -> None:
    gate, up = (made(rows, 400, dtype=dtype) * 8).split(200, 1)
    chosen(False)
    expected = kernels.silu_gate(gate, up)
    chosen(True)
    assert_alike(kernels.silu_gate(gate, up), expected)


def test_silu_gate_of_extremes(chosen: Callable[[bool], None]) -> None:
    gate = torch.tensor([[-1e4, -100.0, -88.0, 0.0, 1e4, torch.inf, torch.nan, 1.0]])
    up = torch.ones_like(gate)
    chosen(True)
    found = kernels.silu_gate(gate, up)
    torch.testing.assert_close(found, torch.nn.functional.silu(gate), equal_nan=True)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_write_kv(dtype: torch.dtype, fused: bool) -> None:
    slots = torch.tensor([9, 0, 4])
    row = made(3, 6, 24, dtype=dtype)
    k, v = (row[:, :2], row[:, 4:]) if fused else (row[:, :2].contiguous(), made(3, 24, 2, dtype=dtype).mT)
    pools = torch.zeros(2, 10, *k.shape[1:], dtype=dtype)
    values = torch.zeros(10, *v.shape[1:], dtype=dtype)
    kernels.write_kv(pools[0], values, slots, k, v)
    for place, token in enumerate(slots.tolist()):
        assert torch.equal(pools[0][token], k[place])
        assert torch.equal(values[token], v[place])
    others = [slot for slot in range(10) if slot not in slots.tolist()]
    assert not pools[0][others].any()
    assert not values[others].any()


@pytest.mark.parametrize(
    "call",
    [
        lambda: kernels.rms_norm(made(2, 64, dtype=torch.float32), made(8, dtype=torch.float32), 1e-6),
        lambda: kernels.silu_gate(made(4, 64, dtype=torch.float32), made(2, 64, dtype=torch.float32)),
        lambda: kernels.rotate(*(made(2, heads, 16, dtype=torch.float32) for heads in (2, 1)), *TURNS),
        lambda: kernels.write_kv(*(made(16, 1, 16, dtype=torch.float32) for _ in "kv"), SLOTS, *NEW),
    ],
    ids=["norm", "gate", "rotate", "write_kv"],
)
def test_shapes_that_do_not_fit_are_an_error(call: Callable[[], object], compiled: native.NativeKernels) -> None:
    """The kernels trust them. A hostile config.json would have them read and write past the end of tensors."""
    with torch.inference_mode(), pytest.raises(RuntimeError):
        call()


TURNS = [made(2, 1, 64, dtype=torch.float32) for _ in range(2)]
SLOTS = torch.tensor([0, 1])
NEW = [made(2, 2, 16, dtype=torch.float32) for _ in range(2)]
