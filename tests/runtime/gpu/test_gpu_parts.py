"""The context, the link, attention and capture on a real GPU."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.gpu


def memfd(size_bytes: int) -> Tensor:
    from medusa_runtime.load.views import bytes_tensor

    fd = os.memfd_create("gpu-test")
    os.ftruncate(fd, size_bytes)
    with mmap.mmap(fd, size_bytes) as writable:
        writable[:] = bytes(range(251)) * (size_bytes // 251) + bytes(size_bytes % 251)
    memory = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    os.close(fd)
    return bytes_tensor(memoryview(memory))


def test_torch_works_in_the_context_that_was_retained(cuda: torch.device) -> None:
    from medusa_runtime.device.context import DeviceContext
    from medusa_runtime.device.driver import Driver

    with DeviceContext() as context:
        info = context.wait()
        torch.empty(1, device=cuda)
        current = ctypes.c_void_p()
        Driver().call("cuCtxGetCurrent", ctypes.byref(current))
        assert current.value == info.context
        assert info.name == torch.cuda.get_device_name(cuda)
        assert info.total_bytes == torch.cuda.get_device_properties(cuda).total_memory


def test_a_link_copies_every_byte(cuda: torch.device) -> None:
    from medusa_runtime.load.upload.cuda_link import CudaLink

    source = memfd(40 << 20)
    link = CudaLink(cuda)
    target = link.allocate("weights", source.nbytes)
    target.fill_(0)
    torch.cuda.synchronize()
    pieces = [(0, 100), (100, 5000), (5000, 9 << 20), (9 << 20, source.nbytes)]
    copies = [link.copy(target[a:b], source[a:b], urgent=n % 2 == 0) for n, (a, b) in enumerate(pieces)]
    while not all(copy.done() for copy in copies):
        pass
    assert torch.equal(target.cpu(), source)
    wide = link.allocate("wide", 4 << 20).view(torch.float32)
    halves = source[: 2 << 20].view(torch.float16).nan_to_num()
    copy = link.copy(wide, halves, urgent=True)
    while not copy.done():
        pass
    assert torch.equal(wide.cpu(), halves.float())
    link.close()
    link.close()


@pytest.mark.parametrize("shape", [(32, 8, 128), (14, 2, 64), (32, 32, 64), (71, 1, 64)])
def test_decode_attention_is_right(cuda: torch.device, shape: tuple[int, int, int]) -> None:
    from medusa_runtime.kernels import paged, paged_triton

    heads, kv_heads, size = shape
    torch.manual_seed(0)
    contexts = torch.tensor([1, 16, 63, 64, 65, 700, 1000], device=cuda)
    keys, values = (torch.randn(512, 16, kv_heads, size, device=cuda, dtype=torch.bfloat16) for _ in range(2))
    tables = torch.randperm(512, device=cuda)[: 7 * 64].view(7, 64).to(torch.int32)
    q = torch.randn(7, heads, size, device=cuda, dtype=torch.bfloat16)
    rows = torch.arange(7, dtype=torch.int32, device=cuda)
    found = paged_triton.decode(q, keys, values, tables, contexts, scale=size**-0.5, window=None).float()
    expected = paged.attention(
        q.float(), keys.float(), values.float(), tables, rows, contexts.int(), scale=size**-0.5, window=None
    )
    assert (found - expected).norm() / expected.norm() < 1e-2


def test_decoded_keys_and_values_are_written_where_attention_reads_them(cuda: torch.device) -> None:
    from medusa_runtime.kernels import paged_triton

    pools = [torch.randn(64 * 16, 8, 128, device=cuda, dtype=torch.bfloat16) for _ in range(2)]
    fused = torch.randn(7, 3 * 8 * 128, device=cuda, dtype=torch.bfloat16)
    k, v = (part.view(7, 8, 128) for part in fused.chunk(3, dim=1)[1:])
    slots = torch.randperm(64 * 16, device=cuda)[:7]
    wanted = [pool.clone().index_copy_(0, slots, part) for pool, part in zip(pools, (k, v), strict=True)]
    paged_triton.write(pools[0], pools[1], slots, k, v)
    for pool, expected in zip(pools, wanted, strict=True):
        assert torch.equal(pool, expected)


def test_capture_and_replay(cuda: torch.device) -> None:
    from medusa_runtime.engine.gpu.capture import CudaCapturer

    capturer = CudaCapturer(cuda)
    x, out = torch.ones(64, 64, device=cuda), torch.zeros(64, 64, device=cuda)
    works: list[Any] = [lambda: out.copy_(x @ x), lambda: out.copy_(x + 1)]
    for work in works:
        capturer.warm_up(work)
    graphs = [capturer.capture(work) for work in works]
    x.fill_(2)
    graphs[0].replay()
    torch.cuda.synchronize()
    assert (out == 256).all()
    graphs[1].replay()
    torch.cuda.synchronize()
    assert (out == 3).all()


def test_memory_is_placed_where_it_was_asked_for(cuda: torch.device) -> None:
    from medusa_runtime.engine.gpu.placed_memory import BASE, PlacedMemory
    from medusa_runtime.state.graphs.driver import CudaDriver

    torch.empty(1, device=cuda)
    memory = PlacedMemory(CudaDriver(), cuda, BASE + (1 << 40))
    first, second = memory("a", 5 << 20), memory("b", 100)
    assert first.data_ptr() == BASE + (1 << 40)
    assert second.data_ptr() > first.data_ptr() + first.nbytes
    first.fill_(3)
    assert (first == 3).all()


def test_graphs_are_captured_in_a_pool_at_a_chosen_address(cuda: torch.device) -> None:
    from medusa_runtime.engine.gpu.capture import CudaCapturer
    from medusa_runtime.engine.gpu.graph_pool import POOL_BASE, GraphPool
    from medusa_runtime.state.graphs.driver import CudaDriver

    torch.empty(1, device=cuda)
    base = POOL_BASE + (1 << 41)
    pool = GraphPool(CudaDriver(), base)
    capturer = CudaCapturer(cuda, memory=pool, keep_graph=True)
    x, out = torch.ones(64, 64, device=cuda), torch.zeros(64, 64, device=cuda)

    def work() -> None:
        large = torch.ones(4 << 20, device=cuda)  # a segment of its own, which only the capture asks for
        out.copy_(x @ x + large[:64])

    def product() -> None:
        out.copy_(x @ x)

    capturer.warm_up(product)
    graph = capturer.capture(work)
    x.fill_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 257).all()
    found = pool.memory_range
    assert found.address == base
    segments = [one for one in torch.cuda.memory_snapshot() if tuple(one["segment_pool_id"]) == tuple(pool.id)]  # type: ignore[no-untyped-call]
    assert sum(one["total_size"] for one in segments) == found.size
    assert all(base <= one["address"] < base + found.size for one in segments)


def test_a_wider_block_table_makes_no_other_kernel(cuda: torch.device) -> None:
    from medusa_runtime.kernels import paged_triton

    keys, values = (torch.randn(512, 16, 2, 64, device=cuda, dtype=torch.bfloat16) for _ in range(2))
    counts = []
    for count, width in [(1, 1), (1, 9), (2, 16), (3, 32)]:
        lengths = torch.ones((2, count), dtype=torch.long, device=cuda)[1]  # where an eager step has its contexts
        tables = torch.zeros((count, width), dtype=torch.int32, device=cuda)
        q = torch.randn(count, 4, 64, device=cuda, dtype=torch.bfloat16)
        paged_triton.decode(q, keys, values, tables, lengths, scale=0.125, window=None)
        counts.append(len(paged_triton._attend.device_caches[cuda.index][0]))
    assert len(set(counts)) == 1, counts
