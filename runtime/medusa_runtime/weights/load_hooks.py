"""Old names of tensors, which a module's own ``load_state_dict`` hooks bring up to date: weight_norm's do."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from medusa_runtime.errors import MismatchError
from medusa_runtime.weights.index import WeightIndex
from medusa_runtime.weights.plan import Rename


def with_load_hooks(module: nn.Module, index: WeightIndex, rename: Rename) -> Rename:
    """``rename``, and then what the module's hooks make of the names.

    They are run on a state dict without values, before any has come. MismatchError where one computes something: that
    is another checkpoint, to be made once and stored.
    """
    hooked = [(name, part) for name, part in module.named_modules() if part._load_state_dict_pre_hooks]
    hooked = [(name, part) for name, part in hooked if not isinstance(part, LazyModuleMixin)]  # theirs makes memory
    if not hooked:
        return rename
    state: dict[str, Tensor] = {}
    stored: dict[int, tuple[Tensor, str]] = {}
    for name in index.order:
        target = rename(name)
        if target is not None:
            state[target] = torch.empty(index.tensors[name].shape, device="meta")
            stored[id(state[target])] = state[target], name
    for name, part in hooked:
        for hook in list(part._load_state_dict_pre_hooks.values()):
            hook(state, f"{name}." if name else "", {}, True, [], [], [])
    renamed: dict[str, str] = {}
    for target, tensor in state.items():
        if id(tensor) not in stored:
            raise MismatchError(
                f"a load_state_dict hook of the module computes {target!r} when it is loaded; expected one that only "
                "renames: load the checkpoint so once, and save the module's state_dict()"
            )
        renamed[stored[id(tensor)][1]] = target
    return renamed.get
