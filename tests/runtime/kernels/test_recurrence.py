"""The compiled convolution and recurrence against torch's operations, token by token."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from medusa_runtime.kernels import native, recurrence
from medusa_runtime.kernels.recurrence import Steps, convolve, recur
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LENGTHS, BEGINS, SLOTS = [7, 1, 90], [0, 5, 33], [3, 0, 4]  # of three sequences, in a pool of five slots
STEPS = Steps(torch.tensor(SLOTS), torch.tensor(BEGINS), torch.tensor([0, *LENGTHS]).cumsum(0))
HEADS = [(4, 2, 16, 24), (16, 16, 128, 128), (3, 1, 8, 72)]  # heads, key heads, sizes of keys and values


@pytest.fixture(autouse=True)
def chosen(compiled: native.NativeKernels, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """``chosen(True)`` takes the compiled kernels, ``chosen(False)`` torch."""

    def choose(take: bool) -> None:
        monkeypatch.setattr(recurrence, "native_kernels_for", lambda *tensors: compiled if take else None)

    with torch.inference_mode():
        yield choose


def made(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def inputs(tokens: int, heads: int, key_heads: int, key_dim: int, value_dim: int) -> list[Tensor]:
    """Queries, keys, values, decays and rates, the first of them with gaps between their heads."""
    q, k = made(tokens, key_heads, key_dim + 1)[..., :-1], made(tokens, key_heads, key_dim)
    scalars = made(2, tokens, heads).sigmoid()
    return [q, torch.nn.functional.normalize(k, dim=-1), made(tokens, heads, value_dim), *scalars]


def one_sequence(slot: int, begin: int, tokens: int) -> Steps:
    return Steps(torch.tensor([slot]), torch.tensor([begin]), torch.tensor([0, tokens]))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("channels", "taps"), [(8, 2), (104, 4), (4096, 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_convolution(
    chosen: Callable[[bool], None], dtype: torch.dtype, channels: int, taps: int, has_bias: bool
) -> None:
    x = made(sum(LENGTHS), channels + 8, dtype=dtype)[:, 8:]
    weight, bias = made(channels, taps, dtype=dtype), made(channels, dtype=dtype) if has_bias else None
    found = []
    for take in (False, True):
        chosen(take)
        states = made(5, taps - 1, channels, dtype=dtype)
        found.append((convolve(x, weight, bias, states, STEPS), states))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found[1][0], found[0][0], rtol=2 * eps, atol=8 * torch.finfo(torch.float32).eps)
    assert torch.equal(found[1][1], found[0][1])
    whole = torch.cat((torch.zeros(taps - 1, channels), x[: LENGTHS[0]].float())).T[None]
    floats = None if bias is None else bias.float()
    expected = torch.nn.functional.conv1d(whole, weight.float()[:, None], floats, groups=channels)[0].T
    torch.testing.assert_close(found[1][0][: LENGTHS[0]].float(), expected, rtol=eps, atol=1e-6 + eps)


@pytest.mark.parametrize("has_rate", [False, True])
@pytest.mark.parametrize("sizes", HEADS)
def test_recurrence(chosen: Callable[[bool], None], sizes: tuple[int, int, int, int], has_rate: bool) -> None:
    *given, rate = inputs(sum(LENGTHS), *sizes)
    heads, _, key_dim, value_dim = sizes
    found = []
    for take in (False, True):
        chosen(take)
        states = made(5, heads, key_dim, value_dim)
        found.append((recur(*given, rate if has_rate else None, states, STEPS), states))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    untouched = [slot for slot in range(5) if slot not in SLOTS]
    assert torch.equal(found[1][1][untouched], made(5, heads, key_dim, value_dim)[untouched])


def test_a_token_has_the_same_bits_however_its_sequence_is_cut(chosen: Callable[[bool], None]) -> None:
    chosen(True)
    tokens = 60
    given, x, weight = inputs(tokens, 4, 2, 16, 72), made(tokens, 136, dtype=torch.bfloat16), made(136, 4)
    found = []
    for cuts in ([60], [1, 30, 17, 12]):
        states, before = made(2, 4, 16, 72), made(2, 3, 136, dtype=torch.bfloat16)
        begin, outs = 0, []
        for length in cuts:
            part, steps = slice(begin, begin + length), one_sequence(1, begin, length)
            read = recur(*(one[part] for one in given), states, steps)
            outs.append((read, convolve(x[part], weight.bfloat16(), None, before, steps)))
            begin += length
        found.append((*map(torch.cat, zip(*outs, strict=True)), states, before))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v, decay, rate = inputs(7, 4, 2, 16, 24)
    states = made(5, 4, 16, 24)
    for wrong in (
        (q[:, :1], k, v, decay, rate, states), (q, k, v[:, :3], decay, rate, states),
        (q, k, v, decay[1:], rate, states), (q, k, v, decay, rate[:, 1:], states),
        (q, k, v, decay, rate, states[:, :, 1:]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="expected shapes that fit"):
            recur(*wrong, STEPS)
    with pytest.raises(ValueError, match="expected x and states for 16 channels and 4 taps"):
        convolve(made(7, 16), made(16, 4), None, made(5, 4, 16), STEPS)
