"""What the engine needs of a GPU, in one place."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config import Settings
from ..timeline import Timeline
from ..weights.upload import Link

if TYPE_CHECKING:  # a start on a CPU imports nothing of this
    from ..models import DecoderModel
    from ..weights.loader import Loader
    from .decode_graphs import Capturer
    from .gpu_runner import GpuRunner
    from .kv_cache import KvCache


def open_gpu(settings: Settings, timeline: Timeline) -> Gpu | None:
    """The device of these settings; None for the CPU."""
    if settings.device != "cuda":
        return None
    with timeline.stage("device"):
        return Gpu()


class Gpu:
    """One device: the way of weights into it, its free memory, and how graphs are captured on it."""

    def __init__(self, ordinal: int = 0, *, way: str = "auto") -> None:
        """``way`` of weights: see CudaLink. The context is there already, so this takes milliseconds."""
        from ..weights.cuda_link import CudaLink

        self.device = torch.device("cuda", ordinal)
        torch.cuda.set_device(self.device)
        self.link: Link = CudaLink(self.device, way=way)

    def memory(self, name: str, size_bytes: int) -> Tensor:
        """uint8 [size_bytes], mapped and not cleared. DeviceError if there is not enough."""
        return self.link.memory(name, size_bytes)

    def free_beside(self, loader: Loader) -> int:
        """Bytes that are free when the weights have their place. Raises what placing them raised."""
        loader.wait_placed()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def capturer(self) -> Capturer | None:
        """None where decode steps cannot be captured."""
        from ..kernels import cuda

        if cuda.triton_obstacle() is not None:
            return None
        from .cuda_capture import CudaCapturer

        return CudaCapturer(self.device)

    def working(self) -> AbstractContextManager[object]:
        """In this context new tensors are made on the device."""
        return self.device

    def runner(
        self,
        model: DecoderModel,
        cache: KvCache,
        loader: Loader,
        max_concurrency: int,
        max_model_len: int,
        timeline: Timeline,
    ) -> GpuRunner:
        from .gpu_runner import GpuRunner

        return GpuRunner(
            self, model, cache, loader, max_concurrency=max_concurrency, max_model_len=max_model_len, timeline=timeline
        )
