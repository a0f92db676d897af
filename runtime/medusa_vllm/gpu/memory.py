"""Names all device memory that vLLM's graphs may point into, with the same names in every process.

vLLM allocates weights, KV cache and its static inputs where torch puts them. A tensor's name is the shortest path of
attributes to it from the model runner, such as ``input_buffers.positions`` or
``model.layers.0.self_attn.qkv_proj.weight``. So nothing of vLLM's has to be listed here, and new tensors are found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import torch
from medusa_runtime.state.graphs.blueprint import MemoryRange, RangeKind
from torch import Tensor, nn

_OURS = ("vllm", "medusa_vllm")  # whose objects are searched for tensors
_PLAIN = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device)
_UNNAMED_ATTRIBUTES = ("_modules", "_parameters", "_buffers")


def named_ranges(root: object, wanted: Callable[[Tensor], bool]) -> list[MemoryRange]:
    """Return a range for each storage that is reached from ``root``. ``wanted`` says if a tensor is on the device."""
    found: dict[int, MemoryRange] = {}
    for name, tensor in _tensors(root):
        if wanted(tensor):
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            if size and address not in found:
                found[address] = MemoryRange(name, RangeKind.NAMED, address, size)
    return drop_nested(found.values())


def drop_nested(ranges: Iterable[MemoryRange]) -> list[MemoryRange]:
    """Drop ranges that begin inside another one: views that were made from an address."""
    kept: list[MemoryRange] = []
    for memory_range in sorted(ranges, key=lambda memory_range: (memory_range.address, -memory_range.size)):
        if not kept or memory_range.address >= kept[-1].address + kept[-1].size:
            kept.append(memory_range)
    return kept


def _tensors(root: object) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor below ``root``, with its name.

    Breadth first, so that the shortest path gives the name, and in the order in which attributes were made.
    """
    seen: dict[int, object] = {id(root): root}  # the objects are kept, because an id may be used again
    waiting: deque[tuple[str, object]] = deque([("", root)])
    while waiting:
        path, thing = waiting.popleft()
        if isinstance(thing, Tensor):
            yield path, thing
            continue
        for key, child in _children(thing):
            if isinstance(child, _PLAIN) or id(child) in seen:
                continue
            seen[id(child)] = child
            waiting.append((path if key in _UNNAMED_ATTRIBUTES else f"{path}.{key}".lstrip("."), child))


def _children(thing: object) -> Iterable[tuple[object, object]]:
    if isinstance(thing, dict):
        return [(key, value) for key, value in thing.items() if isinstance(key, str | int)]
    if isinstance(thing, list | tuple):
        return enumerate(thing)
    kind = type(thing)
    if isinstance(thing, nn.Module) or kind.__module__.partition(".")[0] in _OURS or kind.__module__ == "types":
        return list(getattr(thing, "__dict__", {}).items())
    return ()


__all__ = ["drop_nested", "named_ranges"]
