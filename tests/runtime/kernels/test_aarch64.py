"""The kernels for aarch64, cross-compiled and run by qemu, against this machine's.

Only the kernels are emulated, not torch. Tensors lie in memory at an address that is free in both processes, so that
pointers mean the same in both.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from built_once import built_once
from ggml_blocks import usual
from medusa_runtime.checkpoint.gguf.blocks import BLOCKS
from medusa_runtime.kernels import build, native
from medusa_runtime.kernels.compiled import native_kernels
from torch import Tensor

ADDRESS, SIZE = 0x20_0000_0000, 1 << 22
COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64-static"
LIBRARIES = "/usr/aarch64-linux-gnu"  # Debian's, for programs that the cross compiler makes
THREADS = 2
DTYPES = list(native.DTYPES)
# The dot products of bf16 and of bytes, with the dtypes for which they change what is computed.
DTYPES_OF_DOTS = {(0, 0): DTYPES, (0, 1): [torch.bfloat16, torch.float16], (1, 1): [torch.bfloat16]}
DOTS_OF_DTYPES = [(dtype, (0, 0)) for dtype in DTYPES] + [(torch.bfloat16, (1, 0))]

pytestmark = [
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no {COMPILER}"),
    pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR}"),
]


class Image:
    """Memory at ADDRESS, shared with a file that the emulated process maps at the same place."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(SIZE))
        self.path, self._used = path, 0
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        fd = os.open(path, os.O_RDWR)
        fixed = 0x100000 | mmap.MAP_SHARED  # MAP_FIXED_NOREPLACE
        assert libc.mmap(ADDRESS, SIZE, mmap.PROT_READ | mmap.PROT_WRITE, fixed, fd, 0) == ADDRESS
        os.close(fd)
        self._memory = (ctypes.c_char * SIZE).from_address(ADDRESS)

    def place(self, value: Tensor | ctypes.Structure | ctypes.Array[Any]) -> Any:
        """A copy in the image."""
        start = self._used
        size = value.nbytes if isinstance(value, Tensor) else ctypes.sizeof(value)
        self._used += -(-size // 64) * 64
        assert self._used <= SIZE
        if isinstance(value, Tensor):
            made = torch.frombuffer(self._memory, dtype=value.dtype, count=value.numel(), offset=start)
            return made.view(value.shape).copy_(value)
        copied = type(value).from_address(ADDRESS + start)
        ctypes.pointer(copied)[0] = value
        return copied

    def close(self) -> None:
        libc = ctypes.CDLL(None)
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        libc.munmap(ADDRESS, SIZE)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the kernels and the program that calls them, for aarch64."""

    def compile_all(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CC", COMPILER)
            assert build.machine() == "aarch64"
            build.build(folder / build.LIBRARY_NAME)
        source = Path(__file__).with_name("emulated.c")
        subprocess.run([COMPILER, "-O1", "-Wall", "-o", str(folder / "emulated"), str(source), "-ldl"], check=True)

    return built_once(tmp_path_factory, "aarch64", compile_all)


@pytest.fixture
def image(tmp_path: Path) -> Iterator[Image]:
    made = Image(tmp_path / "image")
    yield made
    made.close()


@pytest.fixture
def here() -> native.NativeKernels:
    kernels = native_kernels()
    if isinstance(kernels, str):
        pytest.skip(kernels)
    return kernels


def call(image: Image, emulated: Path, name: str, *integers: Any, floats: Any = (0, 0), dots: Any = (0, 0)) -> None:
    """Call a function. ``dots`` says whether the CPU has dot products of bf16, and of bytes."""
    command = [EMULATOR, "-cpu", "max", "-L", LIBRARIES, str(emulated / "emulated"), str(emulated / build.LIBRARY_NAME)]
    command += [
        "128",
        f"{dots[0]},{dots[1]}",
        str(image.path),
        str(ADDRESS),
        str(SIZE),
        name,
        *map(str, (*floats, *integers)),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert ran.returncode == 0, ran.stderr


def assert_alike(found: Tensor, expected: Tensor) -> None:
    """Equal but for the order in which fp32 sums are made, which decides a rounding here and there."""
    eps = torch.finfo(found.dtype).eps
    torch.testing.assert_close(found, expected, rtol=4 * eps, atol=max(eps / 8, 2e-6))


def made(image: Image, *shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    placed: Tensor = image.place(torch.randn(shape, generator=generator).to(dtype))
    return placed


@pytest.mark.parametrize(("dtype", "dots"), DOTS_OF_DTYPES, ids=str)
def test_products(image: Image, emulated: Path, here: native.NativeKernels, dtype: torch.dtype, dots: Any) -> None:
    depth, cols = 2070, (97, 30)
    x, weights = made(image, 40, depth, dtype=dtype), [made(image, each, depth, dtype=dtype) for each in cols]
    bias, out = made(image, 97, dtype=dtype), image.place(torch.zeros(40, sum(cols), dtype=dtype))
    parts = (native._Part * 2)()
    for part, weight, each in zip(parts, weights, (bias.data_ptr(), None), strict=True):
        part.weight, part.bias, part.cols, part.weight_stride = weight.data_ptr(), each, weight.shape[0], depth
    place = ctypes.addressof(image.place(parts))
    alone = None
    for rows in (1, 5, 7, 40):
        strides = (rows, depth, depth, 0)
        pointers = (out.data_ptr(), x.data_ptr(), place, 2, 0)
        call(image, emulated, "medusa_products", *pointers, *strides, native.DTYPES[dtype], THREADS, dots=dots)
        torch.testing.assert_close(
            out[:rows], here.products(x[:rows], weights, [bias, None]), rtol=4 * torch.finfo(dtype).eps, atol=2e-3
        )
        alone = out[0].clone() if alone is None else alone
        assert torch.equal(out[0], alone)  # a row has the same bits in every batch


@pytest.mark.parametrize(("dtype", "dots"), DOTS_OF_DTYPES, ids=str)
@pytest.mark.parametrize("packing", ["int8", "nibbles", "fp8"])
def test_products_with_quantized_weights(
    image: Image, emulated: Path, here: native.NativeKernels, packing: str, dtype: torch.dtype, dots: Any
) -> None:
    cols, depth, per_byte = 37, 2080, 2 if packing == "nibbles" else 1
    values = made(image, cols, depth // per_byte, dtype=torch.float32).abs().mul(40).to(torch.uint8).clamp(max=120)
    scale = made(image, cols, depth // 32, dtype=torch.bfloat16)
    zero = None if packing == "fp8" else made(image, 1, 1, dtype=torch.float32)
    number = {"int8": 0, "nibbles": 3, "fp8": 7}[packing]
    codes = native.StoredCodes(image.place(values), scale, shape=(cols, depth), packing=number, size=(1, 32), zero=zero)
    part = native._Part(cols=cols, codes=ctypes.addressof(image.place(codes._struct)))
    x, out = made(image, 40, depth, dtype=dtype), image.place(torch.zeros(40, cols, dtype=dtype))
    place = ctypes.addressof(image.place((native._Part * 1)(part)))
    floats = torch.zeros(cols, depth)
    here.dequantize(codes, floats)
    expected = here.linear(x.float(), floats, None)
    for rows in (1, 40):
        pointers = (out.data_ptr(), x.data_ptr(), place, 1, 0)
        integers = (rows, depth, depth, 0, native.DTYPES[dtype], THREADS)
        call(image, emulated, "medusa_products", *pointers, *integers, dots=dots)
        error = (out[:rows].float() - expected[:rows]).abs().max() / expected.abs().max()
        assert error < 2 * torch.finfo(dtype).eps + 1e-6


@pytest.mark.parametrize("dots", DTYPES_OF_DOTS, ids=str)
@pytest.mark.parametrize("kind", BLOCKS)
def test_products_with_blocks(image: Image, emulated: Path, here: native.NativeKernels, kind: str, dots: Any) -> None:
    """Both machines make the same floats, and round activations alike. A row has the same bits in every batch."""
    block = BLOCKS[kind]
    cols, depth = 37, 512 + block.values
    codes: Any = usual(kind, cols, depth)
    codes = codes._replace(stored=image.place(codes.stored)).kept(torch.bfloat16)
    found, floats = image.place(torch.zeros(cols, depth)), torch.zeros(cols, depth)
    here.dequantize(codes.codes, floats)
    job = image.place(codes.codes.job(found, 0, native.DTYPES[torch.float32]))
    call(image, emulated, "medusa_dequantize", ctypes.addressof(job), THREADS)
    assert torch.equal(found, floats)
    part = native._Part(cols=cols, codes=ctypes.addressof(image.place(codes.codes._struct)))
    place = ctypes.addressof(image.place((native._Part * 1)(part)))
    for dtype in DTYPES_OF_DOTS[dots]:
        x, out = made(image, 257, depth, dtype=dtype), image.place(torch.zeros(257, cols, dtype=dtype))
        alone = None
        for rows in (1, 20, 40, 257):
            pointers = (out.data_ptr(), x.data_ptr(), place, 1, 0)
            integers = (rows, depth, depth, 0, native.DTYPES[dtype], THREADS)
            call(image, emulated, "medusa_products", *pointers, *integers, dots=dots)
            is_decoded = dtype is torch.float32 or (dtype is torch.bfloat16 and dots[0] and rows > 32)
            expected = here.linear(x.float(), floats, None) if is_decoded else here.products(x, (codes,), (None,))
            error = (out[:rows].float() - expected[:rows]).abs().max() / expected.abs().max()
            assert error < 2 * torch.finfo(dtype).eps + 1e-6
            if rows <= 32:
                alone = out[0].clone() if alone is None else alone
                assert torch.equal(out[0], alone)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_steps_between_products(image: Image, emulated: Path, here: native.NativeKernels, dtype: torch.dtype) -> None:
    number, item = native.DTYPES[dtype], dtype.itemsize
    rows, size, heads, head_dim = 9, 96, 3, 32
    x, up, weight = (made(image, *shape, dtype=dtype) for shape in ((rows, size), (rows, size + 8), (size,)))
    up = up[:, 8:]
    out = image.place(torch.zeros(rows, size, dtype=dtype))
    pointers, norm_layout = (out.data_ptr(), x.data_ptr(), weight.data_ptr()), (rows, size, 1, size * item, 0)
    call(*(image, emulated, "medusa_norm", *pointers, *norm_layout, 0, number, THREADS), floats=(1e-5, 1.0))
    assert_alike(out, here.norm(x, weight, 1e-5, once=False, offset=1.0))

    pointers = (out.data_ptr(), x.data_ptr(), up.data_ptr())
    call(image, emulated, "medusa_gate", *pointers, rows, size, size * item, (size + 8) * item, number, THREADS)
    assert_alike(out, here.gate(x, up))

    q, k = made(image, rows, heads, head_dim, dtype=dtype), made(image, rows, 1, head_dim, dtype=dtype)
    cos, sin = (made(image, rows, 1, head_dim, dtype=dtype) for _ in range(2))
    expected = q.clone(), k.clone()
    here.rotate(*expected, cos, sin)
    pointers = tuple(each.data_ptr() for each in (q, k, cos, sin))  # type: ignore[assignment]
    sizes = (rows, heads, 1, head_dim, head_dim, heads * head_dim * item, head_dim * item)
    call(image, emulated, "medusa_rope", *pointers, *sizes, number, THREADS)
    assert_alike(q, expected[0])
    assert_alike(k, expected[1])


@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention(image: Image, emulated: Path, here: native.NativeKernels, dtype: torch.dtype, window: int) -> None:
    tokens, heads, kv_heads, head_dim, blocks, block_size = 20, 6, 2, 48, 7, 16
    q = made(image, tokens, heads, head_dim, dtype=dtype)
    pools = made(image, 2, blocks, block_size, kv_heads, head_dim, dtype=dtype)
    tables = image.place(torch.tensor([[3, 1, 5, 0], [2, 6, 4, 0]], dtype=torch.int32))
    sequences = image.place(torch.tensor([0] * 19 + [1], dtype=torch.int32))
    contexts = image.place(torch.tensor([*range(20, 39), 45], dtype=torch.int32))
    out = image.place(torch.zeros_like(q))
    job = native._Attention(
        *(q.data_ptr(), out.data_ptr(), None, native._pool(pools[0]), native._pool(pools[1])),
        *(tables.data_ptr(), sequences.data_ptr(), contexts.data_ptr(), heads * head_dim * dtype.itemsize, 4),
        *(tokens, heads, kv_heads, head_dim, block_size, window, 0.17),
    )
    call(image, emulated, "medusa_attention", ctypes.addressof(image.place(job)), native.DTYPES[dtype], THREADS)
    expected = here.attention(q, *pools, tables, sequences, contexts, scale=0.17, window=window or None)
    assert_alike(out, expected)
    together, job.tokens = out.clone(), 1
    out[0] = 0
    call(image, emulated, "medusa_attention", ctypes.addressof(image.place(job)), native.DTYPES[dtype], THREADS)
    assert torch.equal(out, together)  # the first token alone, as in decode


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize(
    image: Image, emulated: Path, here: native.NativeKernels, dtype: torch.dtype, transposed: bool
) -> None:
    rows, columns, wide = 40, 264, 24
    values = image.place(torch.randint(-128, 128, (rows, columns), generator=torch.Generator().manual_seed(0)).char())
    scale, zero = made(image, rows, columns // wide, dtype=torch.float32), made(image, rows, 11, dtype=torch.float32)
    out = image.place(torch.zeros((columns, rows) if transposed else (rows, columns), dtype=dtype))
    size: Any = {"shape": (rows, columns), "size": (1, wide), "packing": 0, "transposed": transposed}
    codes = native.StoredCodes(values, scale, zero=zero, **size)
    job = image.place(codes.job(out, 0, native.DTYPES[dtype]))
    call(image, emulated, "medusa_dequantize", ctypes.addressof(job), THREADS)
    expected = torch.zeros_like(out)
    here.dequantize(codes, expected)
    assert torch.equal(out, expected)  # each number is computed alone


def test_it_needs_no_newer_glibc_than_torch(emulated: Path) -> None:
    command = ["aarch64-linux-gnu-objdump", "-T", str(emulated / build.LIBRARY_NAME)]
    symbols = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = {tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([\d.]+)", symbols)}
    assert (2, 17) <= max(needed) <= (2, 28)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layers_that_keep_states(image: Image, emulated: Path, here: native.NativeKernels, dtype: torch.dtype) -> None:
    slots, begins, starts = ([1, 0], [0, 9], [0, 5, 6])
    steps = native.Steps(*(image.place(torch.tensor(each)) for each in (slots, begins, starts)))
    x, weight, bias = (made(image, *shape, dtype=dtype) for shape in ((6, 72), (72, 4), (72,)))
    states, out = made(image, 2, 3, 72, dtype=dtype), image.place(torch.zeros(6, 72, dtype=dtype))
    own = states.clone()
    pointers = {name: one.data_ptr() for name, one in {"out": out, "x": x, "weight": weight, "bias": bias}.items()}
    job = native._Convolution(
        **pointers, states=states.data_ptr(), stride=72 * x.element_size(), channels=72, taps=4,
        steps=native._Steps.of(steps),
    )  # fmt: skip
    call(image, emulated, "medusa_convolve", ctypes.addressof(image.place(job)), native.DTYPES[dtype], THREADS)
    assert_alike(out, here.convolve(x, weight, bias, own, steps))
    assert torch.equal(states, own)
    if dtype is not torch.float32:
        return
    q, k, v = (made(image, 6, *shape, dtype=dtype) for shape in ((2, 16), (2, 16), (4, 40)))
    decay, rate = (image.place(torch.rand(6, 4)) for _ in range(2))
    matrices, out = made(image, 2, 4, 16, 40, dtype=dtype), image.place(torch.zeros(6, 4, 40))
    own = matrices.clone()
    inputs = {"q": q, "k": k, "v": v, "decay": decay, "rate": rate, "states": matrices}
    recurrence = native._Recurrence(
        out=out.data_ptr(), **{name: one.data_ptr() for name, one in inputs.items()}, heads=4, key_heads=2, key_dim=16,
        value_dim=40, steps=native._Steps.of(steps),
    )  # fmt: skip
    call(image, emulated, "medusa_recur", ctypes.addressof(image.place(recurrence)), THREADS)
    assert_alike(out, here.recur(q, k, v, decay, rate, own, steps))
    assert_alike(matrices, own)
