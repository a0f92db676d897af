"""torch.cuda on the fake driver, for scripts: streams, captured graphs, the allocator's snapshot.

Tensors are CPU tensors over the driver's memory. Their copies are launches, which a capture records.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

sys.path.insert(0, str(Path(__file__).parents[2] / "state/graphs"))

from fake_allocator import FakeAllocator
from medusa_runtime.engine.gpu.placed_memory import tensor_at
from toy import MAGIC, NON_BLOCKING, Pool, Toy, open_driver

HOST = torch.device("cpu")
POOL_BYTES, WORKSPACE_BYTES = 1 << 20, 4096
SEGMENT_BYTES = 2 << 20  # what torch's allocator asks for, to cut small blocks from


class Stream:
    def __init__(self, cuda: FakeCuda, handle: int) -> None:
        self._cuda = cuda
        self.cuda_stream = handle

    def wait_stream(self, other: Stream) -> None: ...

    def synchronize(self) -> None:
        self._cuda.driver.call("cuStreamSynchronize", self.cuda_stream)


class FakeGraph:
    """torch.cuda.CUDAGraph, kept or not."""

    def __init__(self, cuda: FakeCuda, keep_graph: bool) -> None:
        self._cuda, self._keep = cuda, keep_graph
        self._graph = self._execution = 0

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        assert not self._cuda.using, "torch captures nothing while use_mem_pool is open"
        self._cuda.pools.append(pool)
        self._before, self._cuda.kernels.pool = self._cuda.kernels.pool, self._cuda.blocks_of(pool)
        self._cuda.capturing = True
        self._cuda.driver.call("cuStreamBeginCapture_v2", self._cuda.current.cuda_stream, 0)

    def capture_end(self) -> None:
        made = ctypes.c_uint64()
        self._cuda.driver.call("cuStreamEndCapture", self._cuda.current.cuda_stream, ctypes.byref(made))
        self._graph = made.value
        self._cuda.kernels.pool, self._cuda.capturing = self._before, False
        if not self._keep:
            self.instantiate()

    def instantiate(self) -> None:
        params = ctypes.create_string_buffer(32)
        self._execution = self._cuda.driver.handle("cuGraphInstantiateWithParams", self._graph, ctypes.byref(params))

    def raw_cuda_graph(self) -> int:
        assert self._keep, "torch has no graph to give unless it was told to keep it"
        return self._graph

    def replay(self) -> None:
        if not self._execution:
            self.instantiate()  # as torch does for one that was kept
        self._cuda.driver.call("cuGraphLaunch", self._execution, self._cuda.current.cuda_stream)


class FakeMemPool(Pool):
    """torch.cuda.MemPool, from whose segments blocks are cut."""

    def __init__(self, cuda: FakeCuda, allocator: FakeAllocator) -> None:
        super().__init__(0)
        self._cuda, self._allocator = cuda, allocator
        self.id = (0, 2 + len(cuda.mem_pools))
        self.segments: list[int] = []
        cuda.mem_pools[self.id] = self

    def malloc(self, size: int) -> int:
        known = len(self._sizes)
        address = super().malloc(size)
        if len(self._sizes) == known:
            return address  # one that was given back
        if not self.segments or address + size > self.segments[-1] + SEGMENT_BYTES:
            del self._sizes[address]
            segment = self._allocator.malloc(SEGMENT_BYTES, 0, self._cuda.current.cuda_stream)
            if not segment:
                raise torch.OutOfMemoryError("CUDA out of memory")
            self.segments.append(segment)
            self._next = segment
            address = super().malloc(size)
        return address


class FakeCuda:
    """torch.cuda, installed once in a process. ``empty`` takes memory from the pool that graphs are captured in."""

    def __init__(self) -> None:
        self.driver, stream = open_driver()
        self.current = Stream(self, stream)
        self.pools: list[Any] = []
        self.mem_pools: dict[tuple[int, int], FakeMemPool] = {}
        self.using, self.capturing = 0, False
        self.at: dict[str, int] = {}
        shifts = int(os.environ.get("FAKE_CUDA_SHIFTS", "0"))
        self._shifts = [self.driver.handle("cuMemAlloc_v2", WORKSPACE_BYTES) for _ in range(shifts)]
        self.renew(pool_first=bool(int(os.environ.get("FAKE_CUDA_ORDER", "0"))))
        self.kernels = Toy(self.driver, stream, self.at)
        self._copies = Copies(self)

    def renew(self, *, pool_first: bool) -> None:
        """Take another pool and workspace at other addresses, as another process would."""
        sizes = {"pool": POOL_BYTES, "workspace": 2 * WORKSPACE_BYTES}
        for name in sorted(sizes, reverse=not pool_first):
            self.at[name] = self.driver.handle("cuMemAlloc_v2", sizes[name])
        self._workspace = 0
        self.at["given back"] = self.at["workspace"] + WORKSPACE_BYTES
        if hasattr(self, "kernels"):
            self.kernels.pool = Pool(self.at["pool"])

    def empty(self, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        count = torch.Size(sizes).numel() * dtype.itemsize
        return tensor_at(self.kernels.malloc(count), count, HOST).view(dtype).view(sizes)

    def free(self, tensor: Tensor) -> None:
        self.kernels.free(tensor.data_ptr())

    def blocks_of(self, pool: Any) -> Pool:
        return self.mem_pools.get(pool, self.kernels.pool)

    @contextmanager
    def use_mem_pool(self, pool: FakeMemPool) -> Iterator[None]:
        assert not self.capturing, "torch enters no pool while it captures"
        before, self.kernels.pool = self.kernels.pool, pool
        self.using += 1
        try:
            yield
        finally:
            self.kernels.pool = before
            self.using -= 1

    @property
    def workspace(self) -> int:
        """A library's, as of cuBLAS: made at its first use, in the pool that is in use then, and kept."""
        if not self._workspace:
            assert not self.capturing, "the warm-up has made it"
            self._workspace = self.kernels.malloc(WORKSPACE_BYTES) if self.using else self.at["workspace"]
            self.driver.write(self._workspace, MAGIC)
        return self._workspace

    def snapshot(self) -> list[dict[str, Any]]:
        """The same as torch.cuda.memory_snapshot: the graphs' pool, and a workspace among other blocks."""
        found = [((0, 1), [(self.at["pool"], POOL_BYTES, "active_allocated")])]
        found += [((0, 0), [(at, WORKSPACE_BYTES, "active_allocated")]) for at in self._shifts]
        names = {"workspace": "active_allocated", "given back": "inactive"}
        found.append(((0, 0), [(self.at[name], WORKSPACE_BYTES, state) for name, state in names.items()]))
        for pool in self.mem_pools.values():
            found += [(pool.id, [(at, SEGMENT_BYTES, "active_allocated")]) for at in pool.segments]
        return [
            {
                "address": blocks[0][0],
                "total_size": sum(size for _, size, _ in blocks),
                "segment_pool_id": pool,
                "blocks": [{"address": at, "size": size, "state": state} for at, size, state in blocks],
            }
            for pool, blocks in found
        ]

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        self.kernels.stream = stream.cuda_stream
        try:
            yield
        finally:
            self.current = before
            self.kernels.stream = before.cuda_stream

    def install(self) -> None:
        patches: dict[str, Any] = {
            "Stream": lambda device=None: Stream(self, self.driver.handle("cuStreamCreate", NON_BLOCKING)),
            "stream": self.stream,
            "current_stream": lambda device=None: self.current,
            "synchronize": lambda device=None: self.driver.call("cuCtxSynchronize"),
            "graph_pool_handle": lambda: (0, 1),
            "CUDAGraph": lambda keep_graph=False: FakeGraph(self, keep_graph),
            "memory_snapshot": self.snapshot,
            "MemPool": lambda allocator: FakeMemPool(self, allocator),
            "use_mem_pool": self.use_mem_pool,
        }
        torch.cuda.memory.CUDAPluggableAllocator = FakeAllocator  # type: ignore[assignment, misc]
        for name, patch in patches.items():
            setattr(torch.cuda, name, patch)
        self._copies.__enter__()

    def owns(self, tensor: Tensor) -> bool:
        return self.driver.range_of(tensor.data_ptr()) is not None


class Copies(TorchFunctionMode):
    """Turns copies between tensors in device memory into launches on the current stream.

    It sees calls of Python's, as engines make them. (A mode that sees each operator would import torch's compiler.)
    """

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__setitem__ and isinstance(args[2], Tensor) and self._cuda.owns(args[2]):
            self.copy(args[0][args[1]], args[2])
            return None
        if function is Tensor.copy_:
            return self.copy(*args[:2])
        return function(*args, **(kwargs or {}))

    def copy(self, target: Tensor, source: Tensor) -> Tensor:
        if not (self._cuda.owns(target) and self._cuda.owns(source)):
            return target.copy_(source)
        assert target.is_contiguous()
        assert source.is_contiguous()
        assert target.nbytes == source.nbytes
        stream = self._cuda.current.cuda_stream
        self._cuda.driver.call("cuMemcpyDtoDAsync_v2", target.data_ptr(), source.data_ptr(), target.nbytes, stream)
        return target
