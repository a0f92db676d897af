"""linear against a product in float64, for every way it can take."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from medusa_runtime import kernels
from medusa_runtime.kernels import build, cpu, native, upcast
from torch import Tensor

HALVES = [torch.bfloat16, torch.float16]
DTYPES = [*HALVES, torch.float32]
# (rows, cols, depth): every tile height and width, depths that end within a step, more than one block of each.
SHAPES = [(rows, 29, 70) for rows in range(1, 15)] + [
    (1, 1, 1),
    (2, 97, 1),
    (8, 100, 2051),
    (33, 200, 1056),
    (300, 50, 100),
    (35, 17, 4101),
    (257, 113, 40),
]


def exact(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double())


def assert_rounded(found: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Within one rounding of the exact product; where terms cancel, fp32's own error counts as well."""
    expected = exact(x, weight, bias)
    error = (found.double() - expected).abs()
    fp32 = F.linear(x.double().abs(), weight.double().abs()) * x.shape[-1] * 2.0**-24
    rounding = expected.abs() * torch.finfo(found.dtype).eps / 2
    tiny = torch.finfo(found.dtype).smallest_normal
    assert found.dtype is x.dtype
    assert bool((error <= 1.01 * rounding + fp32 + tiny).all()), (error - rounding).max()


def sample(rows: int, cols: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows * cols + depth)
    made = [torch.randn(shape, generator=generator) for shape in ((rows, depth), (cols, depth), (cols,))]
    return made[0].to(dtype), made[1].to(dtype), made[2].to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_is_rounded_once(
    compiled: native.NativeKernels, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x, weight, bias = sample(*shape, dtype)
    assert_rounded(compiled.linear(x, weight, bias), x, weight, bias)
    assert_rounded(compiled.linear(x, weight, None), x, weight, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("depth", [1000, 1408, 3001, 5632])
def test_a_row_has_the_same_bits_in_every_batch(compiled: native.NativeKernels, depth: int, dtype: torch.dtype) -> None:
    x, weight, _ = sample(70, 98, depth, dtype)
    alone = torch.cat([compiled.linear(row[None], weight, None) for row in x])
    for rows in (2, 3, 4, 5, 6, 7, 8, 9, 13, 32, 33, 36, 40, 70):
        assert torch.equal(compiled.linear(x[:rows], weight, None), alone[:rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 8, 64, 300])
def test_compiled_on_many_threads(compiled: native.NativeKernels, rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = sample(rows, 1500, 1200, dtype)
    assert_rounded(compiled.linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("rows", [1, 40])
def test_upcast_is_rounded_once(rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = sample(rows, 1030, 130, dtype)
    assert_rounded(upcast.linear(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [2, 40])
def test_infinity_and_nan_pass(compiled: native.NativeKernels, rows: int, dtype: torch.dtype) -> None:
    x, weight, _ = sample(rows, 5, 40, dtype)
    weight[1, 3], weight[2, 39] = float("inf"), float("nan")
    found, expected = compiled.linear(x, weight, None), exact(x, weight, None)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())


def test_rounding_to_nearest_even(compiled: native.NativeKernels) -> None:
    """1 + 2^-8 lies between two bf16 numbers and goes to the even one, 1; a hair more goes up."""
    x = torch.tensor([[1.0, 2.0**-8, 0.0], [1.0, 2.0**-8, 2.0**-16]], dtype=torch.bfloat16)
    found = compiled.linear(x, torch.ones(1, 3, dtype=torch.bfloat16), None)
    assert found.flatten().tolist() == [1.0, 1.0078125]


@pytest.mark.parametrize("rows", [3, 50])
def test_strided_and_misaligned_weights(compiled: native.NativeKernels, rows: int) -> None:
    wide = torch.randn(64, 200).bfloat16()
    x = torch.randn(rows, 120).bfloat16()[:, 7:84]
    weight = wide[::2, 3:80]
    assert_rounded(compiled.linear(x, weight, None), x, weight, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("height", [5, 40])
def test_weights_at_the_end_of_read_only_memory(
    compiled: native.NativeKernels, height: int, dtype: torch.dtype
) -> None:
    """The last row ends where memory ends: an element read further, or a write, would kill this process."""
    page = mmap.PAGESIZE
    rows, count = 2, page // dtype.itemsize
    depth = count // rows - 3
    memory = mmap.mmap(-1, 2 * page)
    values = torch.frombuffer(memory, dtype=dtype, count=count)
    weight = values[count - rows * depth :].view(rows, depth)
    weight.normal_()
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    assert protect(values.data_ptr(), page, mmap.PROT_READ) == 0
    assert protect(values.data_ptr() + page, page, 0) == 0
    x = torch.randn(height, depth).to(dtype)
    assert_rounded(compiled.linear(x, weight, None), x, weight, None)


def test_linear_is_f_linear_for_everything_else() -> None:
    x, weight, bias = sample(4, 6, 8, torch.bfloat16)
    assert torch.equal(kernels.linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))
    assert kernels.linear(x[:0], weight).shape == (0, 6)
    assert kernels.linear(x.to("meta"), weight.to("meta")).device.type == "meta"
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|dtype"):
        kernels.linear(x.float(), weight)
    with pytest.raises(RuntimeError, match=r"shapes|size"):
        kernels.linear(x[:, :5], weight)
    trained = weight.clone().requires_grad_()
    kernels.linear(x, trained, bias).sum().backward()  # type: ignore[no-untyped-call]
    assert trained.grad is not None


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_linear_takes_any_number_of_leading_dimensions(dims: int) -> None:
    shape = (2, 3, 64)[3 - dims :]
    x, weight = torch.randn(shape).bfloat16(), torch.randn(10, 64).bfloat16()
    found = kernels.linear(x, weight)
    assert found.shape == (*shape[:-1], 10)
    assert_rounded(found, x, weight, None)
    transposed = x.transpose(0, -1).contiguous().transpose(0, -1)  # last dimension not contiguous
    assert_rounded(kernels.linear(transposed, weight), x, weight, None)


def _multiply(end: Connection, instruction_set: int, library: Path) -> None:
    x, weight, bias = sample(8, 700, 600, torch.bfloat16)
    end.send(native.NativeKernels(instruction_set, library).linear(x, weight, bias).float().tolist())


def _multiply_fork_and_multiply(end: Connection, instruction_sets: list[int], library: Path) -> None:
    # Our threads stay behind in this process. No others may run here: OpenMP's do not survive a fork.
    x, weight = torch.empty(8, 600, dtype=torch.bfloat16), torch.empty(700, 600, dtype=torch.bfloat16)
    for instruction_set in instruction_sets:
        native.NativeKernels(instruction_set, library).linear(x, weight, None)
        arguments = (end, instruction_set, library)
        child = multiprocessing.get_context("fork").Process(target=_multiply, args=arguments, daemon=True)
        child.start()
        child.join(40)
        if child.exitcode != 0:
            raise SystemExit(1)


_FORK_DURING_A_PRODUCT = """
import os, resource, sys, threading, time
from pathlib import Path
from medusa_runtime.imports.lazy_torch import import_torch
import_torch()  # a second less than plainly
import torch
from medusa_runtime.kernels import native

torch.set_num_threads(1)
kernels = native.NativeKernels(int(sys.argv[1]), Path(sys.argv[2]))
x, large, small = (torch.zeros(rows, 4096, dtype=torch.bfloat16) for rows in (256, 2048, 8))
threading.Thread(target=lambda: [kernels.linear(x, large, None) for _ in range(1000)], daemon=True).start()
for _ in range(3):
    time.sleep(0.1)
    if not (pid := os.fork()):
        faults = []
        for _ in range(4):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            kernels.linear(x, small, None)
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        print(max(faults[1:]), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
os._exit(0)
"""


def test_a_child_keeps_its_scratch_memory_though_it_was_forked_during_a_product(
    library: Path,
) -> None:
    """Else each product would allocate 4 MB anew: a thousand page faults. glibc is kept from caching so much."""
    ran = subprocess.run(
        [sys.executable, "-c", _FORK_DURING_A_PRODUCT, "256" if "avx2" in cpu.features() else "128", str(library)],
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    assert [int(line) < 300 for line in ran.stdout.split()] == [True] * 3, ran.stdout


def test_linear_in_a_forked_child(library: Path) -> None:
    """The parent has multiplied before it forks, so the child inherits a pool whose threads are gone.

    A zygote forks before anything is multiplied, which is easier. All instruction sets are tried in one process,
    because its import of torch takes most of the time.
    """
    known = {"avx2": 256, "avx512f": 512, "asimd": 128}
    instruction_sets = [bits for feature, bits in known.items() if feature in cpu.features()]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    parent = context.Process(target=_multiply_fork_and_multiply, args=(theirs, instruction_sets, library))
    parent.start()
    found = [ours.recv() for _ in instruction_sets if ours.poll(120)]
    parent.join(60)
    assert parent.exitcode == 0
    assert len(found) == len(instruction_sets) > 0
    x, weight, bias = sample(8, 700, 600, torch.bfloat16)
    for output in found:
        assert_rounded(torch.tensor(output).bfloat16(), x, weight, bias)


def test_linear_from_many_threads_at_once(compiled: native.NativeKernels) -> None:
    """One has the pool and the kept scratch memory; the others work alone, with their own."""
    samples = [sample(rows, 300, 500, torch.bfloat16) for rows in (1, 3, 8, 40)]
    expected = [compiled.linear(*each) for each in samples]
    wrong: list[int] = []

    def multiply(number: int) -> None:
        for _ in range(100):
            if not torch.equal(compiled.linear(*samples[number]), expected[number]):
                wrong.append(number)

    threads = [threading.Thread(target=multiply, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_as_many_threads_as_torch_is_set_to(compiled: native.NativeKernels) -> None:
    before = torch.get_num_threads()
    x, weight, bias = sample(8, 700, 600, torch.bfloat16)
    try:
        for count in (1, 3, 2, 9):
            torch.set_num_threads(count)
            for _ in range(50):
                assert_rounded(compiled.linear(x, weight, bias), x, weight, bias)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 300])
def test_several_weights_at_once_are_each_alone(compiled: native.NativeKernels, rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = sample(rows, 333, 90, dtype)
    parts = [slice(0, 200), slice(200, 201), slice(201, 333)]
    weights, biases = [weight[part] for part in parts], [bias[parts[0]], None, bias[parts[2]]]
    found = compiled.products(x, weights, biases)
    expected = [compiled.linear(x, *each) for each in zip(weights, biases, strict=True)]
    assert torch.equal(found, torch.cat(expected, 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_residual_is_added_to_the_rounded_product(dtype: torch.dtype) -> None:
    x, weight, bias = sample(300, 50, 70, dtype)
    wider = torch.randn(300, 80).to(dtype)
    for residual in (wider[:, :50].contiguous(), wider[:, 20:70]):
        with torch.inference_mode():
            found = kernels.linear(x, weight, bias, residual)
            assert torch.equal(found, residual + kernels.linear(x, weight, bias))


def test_several_weights_of_any_kind() -> None:
    x, weight, bias = sample(3, 20, 16, torch.float32)
    with torch.inference_mode():
        first, second = kernels.linears(x, [weight, weight[:7]], [bias, None])
    torch.testing.assert_close(first, F.linear(x, weight, bias))
    torch.testing.assert_close(second, F.linear(x, weight[:7]))


@pytest.mark.skipif("asimd" in cpu.features(), reason="the features are x86's")
def test_describe_names_the_way_and_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def described(*features: str) -> str:
        monkeypatch.setattr(cpu, "features", lambda: frozenset(features))
        kernels._path.cache_clear()
        kernels.native_kernels.cache_clear()
        return kernels.describe()["bfloat16"]

    try:
        assert described("avx2", "fma", "f16c", "avx512_bf16").startswith(
            "torch: the CPU multiplies it itself (avx512_bf16)"
        )
        assert "need avx2, f16c, fma" in described("sse2")
        monkeypatch.setattr(native, "LIBRARY", native.LIBRARY.with_name("missing.so"))
        assert "upcast: no compiled kernel" in described("avx2", "fma", "f16c")
        assert "missing.so" in kernels.describe()["bfloat16"]
        x, weight, bias = sample(20, 30, 40, torch.bfloat16)
        assert_rounded(kernels.linear(x, weight, bias), x, weight, bias)
    finally:
        monkeypatch.undo()
        for cached in (kernels._path, kernels._decoded, kernels.native_kernels):
            cached.cache_clear()


def test_torch_multiplies_many_rows_of_fp32() -> None:
    for rows, ours in ((32, True), (33, False)):
        x, weight, bias = sample(rows, 40, 50, torch.float32)
        path = kernels._path_of(x, weight, bias)
        assert (path.compiled is not None) == (ours and isinstance(kernels.native_kernels(), native.NativeKernels))
        assert_rounded(kernels.linear(x, weight, bias), x, weight, bias)


@pytest.mark.skipif("avx512_bf16" not in cpu.features(), reason="this CPU has no dot products of bf16")
def test_torch_multiplies_many_rows_where_its_products_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "features", lambda: frozenset({*cpu.NEEDED, "avx512f", "avx512vl", "avx512_bf16"}))
    kernels._path.cache_clear()
    try:
        used: list[int] = []
        path = kernels._path(torch.bfloat16)
        compiled = path.compiled
        assert compiled is not None
        products = compiled.products
        monkeypatch.setattr(compiled, "products", lambda x, *rest: used.append(len(x)) or products(x, *rest))
        for rows in (1, 32, 33):
            x, weight, _ = sample(rows, 40, 50, torch.bfloat16)
            assert_rounded(kernels.linear(x, weight), x, weight, None)
        assert used == [1, 32]
        assert not kernels.has_native_products(torch.bfloat16)
    finally:
        kernels._path.cache_clear()


def test_a_compiler_that_is_missing_or_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(build.KernelBuildError, match="no-such-compiler"):
        build.build(tmp_path / "library.so")
    monkeypatch.setenv("CC", "false")
    with pytest.raises(build.KernelBuildError, match="failed"):
        build.build(tmp_path / "library.so")
    assert list(tmp_path.iterdir()) == []


def test_the_command_that_builds_says_nothing_else() -> None:
    command = [sys.executable, "-m", "medusa_runtime.kernels.build"]
    result = subprocess.run(command, env={**os.environ, "CC": "no-such-compiler"}, capture_output=True, text=True)
    assert "no-such-compiler" in result.stderr
    assert "RuntimeWarning" not in result.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8])
def test_no_product_of_another_dtype_is_ours(dtype: torch.dtype) -> None:
    assert not kernels.has_native_products(dtype)


def test_a_library_of_other_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "FLAGS", ("-DMEDUSA_INTERFACE=1", "-O0", "-fPIC"))
    with_interface = [part for part in build.OBJECTS[build.machine()] if part[0] == "parallel"]
    monkeypatch.setitem(build.OBJECTS, build.machine(), with_interface)  # compiling the others takes seconds
    library = build.build(tmp_path / build.LIBRARY_NAME)
    with pytest.raises(native.UnavailableError, match=f"expected interface {build.INTERFACE}, found 1"):
        native.NativeKernels(256, library)
