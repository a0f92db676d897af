"""The GPU as the torch engine uses it, and the CUDA graphs of the state bundle."""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...config import Settings
from ...errors import DeviceError, StateError
from ...process import abort
from ...region.reader import Region
from ...state.kinds import CUDA_GRAPHS, file_name
from ...timeline import Timeline

logger = logging.getLogger(__name__)

_BACKGROUND_THREADS = 2
# What CUDA, cuBLAS and triton say when they find no memory for themselves: for a handle, or for the code of a kernel.
_NO_MEMORY = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate",
    "Triton Error [CUDA]: out of memory",
)

if TYPE_CHECKING:  # a start on a CPU does not import these
    from ...load.loader import Loader
    from ...load.upload.link import Link
    from ...models import DecoderModel
    from .decode_graphs import Capturer, DecodeGraphs, Restorer


def open_gpu(settings: Settings, timeline: Timeline) -> Gpu | None:
    """Open the GPU if the settings' device is "cuda"; else return None."""
    if settings.device != "cuda":
        return None
    with timeline.stage("device"):
        return Gpu()


def is_full(error: Exception) -> bool:
    """Return whether an error says that the GPU has too little memory: torch's allocator's, or a library's."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def full_gpu(error: Exception, what: str) -> DeviceError:
    """Return our error in place of one for which ``is_full`` is true: the GPU has too little memory for ``what``."""
    found = str(error).partition("CUDA out of memory. ")[2].partition(" is free")[0]
    first = str(error).partition("\n")[0]
    free = f" ({found} is free)" if found else "" if isinstance(error, torch.OutOfMemoryError) else f" ({first})"
    return DeviceError(
        f"the GPU's memory has no room for {what}{free}; use a larger GPU, lower "
        "--max-batched-tokens, --max-concurrency or --kv-cache-mb, or end what else runs on this one"
    )


def bundled_graphs(region: Region, settings: Settings, *, auto_restores: bool = True) -> BundledGraphs | None:
    """Return the state bundle's graphs; None if there are none, or the settings do not use them.

    ``auto_restores`` says whether ``--graphs auto`` means ``restore``, or ``capture``.
    """
    if not region.has_code(file_name(CUDA_GRAPHS.name)):
        return None
    if settings.graphs == "capture" or (settings.graphs == "auto" and not auto_restores):
        logger.info("the state bundle's CUDA graphs are not used: --graphs is %s", settings.graphs)
        return None
    return BundledGraphs(region, settings)


class BundledGraphs:
    """The blob of CUDA graphs among a region's files, with the quarantine that says whether it may be used."""

    def __init__(self, region: Region, settings: Settings) -> None:
        from ...state.graphs.restoration.quarantine import Quarantine

        self._region = region
        # With a region of the node agent's, this may be the agent's process with another user's settings. It opens no
        # path that they name.
        self._quarantine = Quarantine(Settings() if region.from_agent else settings, os.environ)
        self._digest = ""

    def has_arrived(self) -> bool:
        """Return whether the blob has arrived, so that ``read`` does not wait."""
        try:
            self._region.view_code(file_name(CUDA_GRAPHS.name), 0.0)
        except TimeoutError:
            return False
        return True

    def read(self) -> memoryview | None:
        """Wait for the blob, and return it where it lies in the region; None if it could not be fetched.

        Raises StateError if these graphs have broken a CUDA context before, or if it contains something else.
        """
        from ...state.graphs.blob_format import digest_of

        data = self._region.view_code(file_name(CUDA_GRAPHS.name))
        if data is None:
            return None
        self._digest = digest_of(data)
        if (reason := self._quarantine.reason(self._digest)) is not None:
            raise StateError(f"they broke the device's context before ({reason}); materialize them again")
        return data

    def quarantine(self, reason: str) -> bool:
        """Record that the graphs break a CUDA context. Returns False if that cannot be written."""
        return self._quarantine.add(self._digest, reason)


class Gpu:
    """One GPU: its memory, the link by which weights reach it, and what captures and restores graphs on it."""

    def __init__(self, *, base: int | None = None, graph_base: int | None = None) -> None:
        """Open the device. This takes milliseconds, because its context exists already.

        ``base``: the address from which memory is placed. ``graph_base``: the address of the pool in which graphs are
        captured, for a process that materializes them. Raises DeviceError if the GPU cannot be opened, such as when it
        has no memory left.
        """
        from ...load.upload.cuda_link import CudaLink
        from ...state.graphs.driver import CudaDriver
        from .placed_memory import BASE, PlacedMemory

        self.device = torch.device("cuda", 0)
        try:
            torch.cuda.set_device(self.device)
            torch.cuda.init()  # type: ignore[no-untyped-call]
            torch.empty(1, device=self.device)  # makes the context this thread's current one
            self.placed = PlacedMemory(CudaDriver(), self.device, BASE if base is None else base)
            self.link: Link = CudaLink(self.device, self.memory)
        except RuntimeError as error:  # torch's, as when memory runs out
            first = str(error).partition("\n")[0]
            raise DeviceError(
                f"the GPU cannot be opened: {first}; expected some hundred MiB free for the context and torch, and "
                "`nvidia-smi` shows what else uses the GPU"
            ) from error
        self._graph_base = graph_base

    def describe(self) -> str:
        """Return what decides the bits of this GPU's results, beside torch's version."""
        from ...kernels import cuda

        name = torch.cuda.get_device_name(self.device)
        return name if cuda.triton_obstacle() is None else f"{name}, without triton"

    def open_link(self, *, in_background: bool) -> Link:
        """Open another link, because a link is of use for one load. Can be called in any thread.

        ``in_background``: steps run meanwhile, and the weights are not needed yet. What a step copies to the device
        waits behind what the link has begun to copy, so the link begins little at a time.
        """
        from ...load.upload.cuda_link import CudaLink

        self.placed.make_current()
        return CudaLink(self.device, self.memory, most_threads=_BACKGROUND_THREADS if in_background else None)

    def memory(self, name: str, size_bytes: int) -> Tensor:
        """Map memory at the address where graphs expect it, and return it as uint8 [size_bytes], uninitialized.

        Raises DeviceError if the GPU has too little memory.
        """
        return self.placed(name, size_bytes)

    def free(self, name: str) -> None:
        """Unmap memory, if it is mapped. No tensor of it may be used any more."""
        self.placed.free(name)

    def limit_blocks(self, planned: int) -> int:
        """Return how many of the ``planned`` blocks the KV cache gets. Subclasses may return fewer."""
        return planned

    def free_bytes_beside_weights(self, loader: Loader) -> int:
        """Wait until all weights have their addresses, and return the free bytes. Raises the loader's error."""
        loader.wait_placed()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def graph_sizes(self, max_concurrency: int) -> tuple[int, ...]:
        """Return the batch sizes that get a CUDA graph; none if decode steps cannot be captured."""
        from ...kernels import cuda
        from .decode_graphs import sizes_for

        return () if cuda.triton_obstacle() is not None else sizes_for(max_concurrency)

    def capturer(self) -> Capturer | None:
        """Return a capturer for decode steps; None if they cannot be captured."""
        from ...kernels import cuda

        if cuda.triton_obstacle() is not None:
            return None
        from .capture import CudaCapturer

        if self._graph_base is None:
            return CudaCapturer(self.device)
        from .graph_pool import open_pool

        self.placed.make_current()
        pool = open_pool(self.placed.driver, self._graph_base)
        return CudaCapturer(self.device, memory=pool, keep_graph=True)

    def restorer(self, model: DecoderModel, graphs: DecodeGraphs) -> Restorer:
        """Return a restorer, which restores a state bundle's graphs a few at a time.

        Call it in the thread that will use the graphs.
        """
        from .graph_state import GraphState

        self.placed.make_current()
        self._state = GraphState(model, graphs, self.placed)  # owns the graphs' memory and kernels
        return self._state

    def context_is_lost(self, error: Exception) -> bool:
        """Return whether the CUDA context is broken, so that every further call fails. ``error`` was raised last."""
        from ...state.graphs.driver import STICKY, CudaError

        found = error if isinstance(error, CudaError) else error.__cause__
        if isinstance(found, CudaError) and found.sticky:
            return True
        return self.placed.driver.result("cuCtxSynchronize") in STICKY

    def abort_process(self) -> None:
        """End this process like a crash, so that the zygote forks a new engine. The region keeps the weights."""
        abort()

    def as_default_device(self) -> AbstractContextManager[object]:
        """Return a context manager in which new tensors are made on the device."""
        return self.device
