"""Weights for vLLM on a GPU, which reach its memory by our link.

vLLM would copy each weight from memory that is not pinned, in one thread: at a fifth of the link's rate. So it gets
tensors that are on the GPU already, as from its own loader for fastsafetensors.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from medusa_runtime.errors import ConfigError
from medusa_runtime.load.upload.cuda_link import CudaLink
from medusa_runtime.load.upload.link import Copy
from medusa_runtime.load.views import Views
from medusa_runtime.region.reader import Region
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_world_size

from .attached import AttachedRegion

Arriving = Callable[[Sequence[str]], Iterator[tuple[str, Tensor]]]

_AHEAD_BYTES = 512 << 20  # of the GPU's memory, for tensors that vLLM has not asked for yet
_COPY_CHECK_S = 0.0002  # how often a wait looks for copies that are done


class _Coming(NamedTuple):
    name: str
    tensor: Tensor
    copy: Copy | None  # None: the tensor is the host's


@contextmanager
def link_to(model: nn.Module, model_config: Any) -> Iterator[CudaLink | None]:
    """Open a link to the GPU that has all of a model's weights.

    None if they are not on one GPU, and where vLLM's own copies are better: ranks read their slices only, and in sleep
    mode what is allocated now counts as weights.
    """
    devices = {parameter.device for parameter in model.parameters()}
    is_on_gpu = len(devices) == 1 and next(iter(devices)).type == "cuda"
    if not is_on_gpu or getattr(model_config, "enable_sleep_mode", False) or get_tensor_model_parallel_world_size() > 1:
        yield None
        return
    link = CudaLink(devices.pop())
    try:
        yield link
    finally:
        link.close()
        torch.cuda.empty_cache()  # what the copies took is of no use to vLLM's streams


@contextmanager
def arriving(attached: AttachedRegion, model: nn.Module, model_config: Any) -> Iterator[Arriving]:
    """Yield what returns the region's tensors by names, in this order: on the model's GPU, or else on the host.

    Raises ConfigError if the host's weights cannot be released as asked, and WeightsError if another process has
    released them.
    """
    attached.region.check_whole()
    with link_to(model, model_config) as link:
        if link is not None:
            if attached.releases and attached.was_uploaded:
                raise ConfigError(
                    "--host-weights release: expected a checkpoint that vLLM reads once, found that a draft reads it "
                    "again (--speculative-config); use --host-weights keep"
                )
            attached.was_uploaded = True
            yield partial(uploaded, attached.region, link=link, release=attached.releases)
            return
        if attached.releases and any(weight.is_cuda for weight in model.parameters()):
            raise ConfigError(
                "--host-weights release: expected all of vLLM's weights on one GPU, found several ranks, sleep mode, "
                "or weights that vLLM keeps on the CPU; use --host-weights keep"
            )
        yield partial(tensors, attached.region)


def tensors(region: Region, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors of the region in this order, as views of it, as soon as each is there."""
    views, entries = Views(region), region.wait_index().tensors
    for name in names:
        region.wait_tensor(name)
        with torch.device("cpu"):
            tensor = views.tensor(name, entries[name])
        yield name, tensor


def uploaded(
    region: Region, names: Sequence[str], *, link: CudaLink, release: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield the same as ``tensors``, but on the device. The next ones are copied meanwhile.

    If the device has no room for a copy, a tensor is still the host's. With ``release``, the region's bytes of each
    tensor are freed once they are copied, and those of what is not asked for here once they have come.
    """
    if release and (unread := region.wait_index().tensors.keys() - names):
        region.release_unread(unread)
    arrived = tensors(region, names)
    waiting, coming, ahead = deque(names), deque[_Coming](), 0
    while waiting or coming:
        while waiting and ahead < _AHEAD_BYTES and (not coming or region.has(waiting[0])):
            waiting.popleft()
            coming.append(_begin(region, link, *next(arrived), copies=release))
            ahead += coming[-1].tensor.nbytes
        name, tensor, copy = coming.popleft()
        ahead -= tensor.nbytes
        if copy is not None:
            while not copy.done():
                time.sleep(_COPY_CHECK_S)
            link.hand_over(tensor)
        if release:
            region.release(name)
        yield name, tensor


def _begin(region: Region, link: CudaLink, name: str, source: Tensor, *, copies: bool) -> _Coming:
    room = link.room_for(source)
    if room is None:
        return _Coming(name, source.clone() if copies else source, None)
    return _Coming(name, room, link.copy(room, source, urgent=False, stored=region.file_range(name)))


__all__ = ["Arriving", "arriving", "tensors"]
