"""Finding tensors that share memory: ``load_state_dict`` writes to it, and so changes all of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_count = getattr(torch._C, "_storage_Use_Count", None)  # a private name


def use_count(tensor: Tensor) -> int | None:
    """Return the number of references to a tensor's memory, including its own.

    Return None where this torch cannot count them.
    """
    return None if _count is None else int(_count(tensor.untyped_storage()._cdata))


def aliased(tensors: Iterable[Tensor]) -> set[int]:
    """Return the ids of tensors whose memory is also used by something else, such as a view that a module keeps.

    Where references to memory cannot be counted, return all tensors that have memory. They are then written in place,
    which is always correct.
    """
    together: dict[int, list[Tensor]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors if not tensor.is_meta}.values():
        together.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    alone = use_count(torch.empty(0))
    return {
        id(one)
        for group in together.values()
        if alone is None or (use_count(group[0]) or 0) > alone - 1 + len(group)
        for one in group
    }
