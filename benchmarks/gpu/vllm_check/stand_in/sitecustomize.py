"""Lets vLLM run on a GPU without its compiled extensions, in every process whose ``PYTHONPATH`` has this folder.

A borrowed machine may have vLLM's Python files alone, or extensions that its torch cannot load. vLLM imports two of
them on any GPU: its kernels, and FlashAttention's. If its kernels are missing, the few that an unquantized Llama or
Qwen2 needs are computed by torch, beside vLLM's own Triton kernels. Others fail when they are called. If FlashAttention
is missing, vLLM has to be told to use another one (see ``starts.py``). The packages for grammars need not be there.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # every process with this folder on its path reads this file
    from torch import Tensor

KERNELS = "vllm._C_stable_libtorch"
ATTENTION = "vllm.vllm_flash_attn._vllm_fa2_C"  # one of its two versions is enough, and the newer one is tried after it
OTHER_ATTENTION = "vllm.vllm_flash_attn._vllm_fa3_C"
GRAMMARS = ("llguidance", "xgrammar")  # vLLM names their classes when it is imported, and uses them for grammars alone


class StandIn(MetaPathFinder, Loader):
    """Finds the two extensions: vLLM's own where they can be loaded, else the replacement."""

    def __init__(self) -> None:
        self.replaced: dict[str, str] = {}  # the reason, by the name of the extension
        self._searching = False
        self._kept: list[Any] = []

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._searching:
            return None
        if (package := name.partition(".")[0]) in GRAMMARS:
            return None if self._is_there(package) else ModuleSpec(name, self, is_package=name == package)
        if name not in (KERNELS, ATTENTION):
            return None
        if (reason := self._obstacle(name)) is None:
            return None
        if name == ATTENTION and self._obstacle(OTHER_ATTENTION) is None:
            return None
        self.replaced[name] = reason
        return ModuleSpec(name, self)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == KERNELS:
            self._kept.append(register_functions())
        elif module.__name__ != ATTENTION:
            module.__getattr__ = empty_class  # type: ignore[method-assign]

    def _is_there(self, package: str) -> bool:
        self._searching = True
        try:
            found = importlib.util.find_spec(package)
            return found is not None and found.loader is not self
        finally:
            self._searching = False

    def _obstacle(self, name: str) -> str | None:
        """Return why an extension cannot be loaded; None if it was loaded."""
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
            if spec is None:
                return "it is not there"
            importlib.util.module_from_spec(spec)
        except ImportError as error:
            return str(error)
        finally:
            self._searching = False
        return None


def empty_class(name: str) -> type:
    """Return a class for any name but Python's own, such as ``__file__``."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def register_functions() -> Any:
    """Register what a dense model needs of vLLM's kernels, and return the library, which has to be kept."""
    from torch.library import Library

    library: Any = Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]
    for schema, function, key in _FUNCTIONS:
        library.define(schema)
        library.impl(schema.partition("(")[0], function, key)
    return library


def view(source: Tensor) -> Tensor:
    """Return a tensor on the GPU over the same memory, which stays the other tensor's."""
    import torch

    device = torch.device("cuda", torch.cuda.current_device())
    storage = torch._C._construct_storage_from_data_pointer(source.data_ptr(), device, _span(source))
    return torch.empty(0, dtype=source.dtype, device=device).set_(storage, 0, source.shape, source.stride())


def unsupported(cuda_device_capability: int) -> bool:
    return False


def rms_norm(result: Tensor, x: Tensor, weight: Tensor | None, epsilon: float) -> None:
    import torch

    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    result.copy_(wide.to(x.dtype) if weight is None else wide.to(x.dtype) * weight)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    residual.add_(x)
    rms_norm(x, residual, weight, epsilon)


def silu_and_mul(result: Tensor, x: Tensor) -> None:
    import torch

    gate, up = x.chunk(2, dim=-1)
    result.copy_(torch.nn.functional.silu(gate) * up)


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> None:
    """Rotate in place. ``cos_sin_cache`` [positions, rotated] has the cosines first."""
    import torch

    if not is_neox or rope_dim_offset or inverse:
        raise NotImplementedError("the stand-in for vLLM's kernels rotates as Llama does")
    rotated = cos_sin_cache.shape[-1]
    cos, sin = cos_sin_cache[positions.flatten()].float().unsqueeze(1).chunk(2, dim=-1)
    for tensor in (query, key):
        if tensor is not None:
            heads = tensor.view(len(cos), -1, head_size)[..., :rotated]
            first, second = heads.float().chunk(2, dim=-1)
            heads.copy_(torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1))


def _span(tensor: Any) -> int:
    """Return the bytes from a tensor's first element to the end of its last one."""
    if not tensor.numel():
        return 0
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int((last + 1) * tensor.element_size())


_ANY = "CompositeExplicitAutograd"
_FUNCTIONS = (  # with vLLM's schemas
    ("weak_ref_tensor(Tensor input) -> Tensor", view, "CUDA"),
    ("get_cuda_view_from_cpu_tensor(Tensor cpu_tensor) -> Tensor", view, "CPU"),
    ("rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()", rms_norm, _ANY),
    (
        "fused_add_rms_norm(Tensor! input, Tensor! residual, Tensor? weight, float epsilon) -> ()",
        fused_add_rms_norm,
        _ANY,
    ),
    ("silu_and_mul(Tensor! result, Tensor input) -> ()", silu_and_mul, _ANY),
    (
        "rotary_embedding(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache,"
        " bool is_neox, int rope_dim_offset=0, bool inverse=False) -> ()",
        rotary_embedding,
        _ANY,
    ),
    ("cutlass_scaled_mm_supports_fp4(int cuda_device_capability) -> bool", unsupported, _ANY),
    ("cutlass_scaled_mm_supports_fp8(int cuda_device_capability) -> bool", unsupported, _ANY),
    ("cutlass_scaled_mm_supports_block_fp8(int cuda_device_capability) -> bool", unsupported, _ANY),
    ("cutlass_group_gemm_supported(int cuda_device_capability) -> bool", unsupported, _ANY),
)

stand_in = StandIn()
sys.meta_path.insert(0, stand_in)
