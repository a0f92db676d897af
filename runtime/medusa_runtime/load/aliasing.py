"""Memory that several tensors look into: ``load_state_dict`` writes to it, and so changes all of them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def use_count(tensor: Tensor) -> int:
    """How many look into its memory; the tensor itself counts more than once."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def aliased(tensors: Iterable[Tensor]) -> set[int]:
    """The ids of those whose memory something else than these looks into: a view that a module has kept."""
    together: dict[int, list[Tensor]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors if not tensor.is_meta}.values():
        together.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    most = use_count(torch.empty(0)) - 1
    return {id(one) for group in together.values() if use_count(group[0]) > most + len(group) for one in group}
