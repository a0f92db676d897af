"""Load hooks, with which a module's own code renames the tensors of old checkpoints, as weight_norm does."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.modules.module import _IncompatibleKeys

from medusa_runtime.checkpoint.index import WeightIndex
from medusa_runtime.errors import MismatchError, WeightsError
from medusa_runtime.load.plan import Rename


def with_load_hooks(module: nn.Module, index: WeightIndex, rename: Rename) -> Rename:
    """Return ``rename``, followed by what the module's hooks and overridden ``_load_from_state_dict`` rename.

    They are run on a state dict without values, before any has arrived. Raises MismatchError if one computes a value:
    the result is another checkpoint, which should be made once and stored.
    """
    parts = [(name, part) for name, part in module.named_modules() if not isinstance(part, LazyModuleMixin)]
    hooked = [(name, part) for name, part in parts if part._load_state_dict_pre_hooks or _loads_itself(part)]
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
        arguments: Any = (state, f"{name}." if name else "", {}, True, [], [], [])
        if _loads_itself(part):
            _without_memory(part)._load_from_state_dict(*arguments)
        else:
            for hook in list(part._load_state_dict_pre_hooks.values()):
                hook(*arguments)
    renamed: dict[str, str] = {}
    for target, tensor in state.items():
        if id(tensor) not in stored and not target.endswith(".num_batches_tracked"):  # which every batch norm adds
            raise MismatchError(
                f"a load_state_dict hook of the module computes {target!r} when it is loaded; expected one that only "
                "renames: load the checkpoint so once, and save the module's state_dict()"
            )
        if id(tensor) in stored:
            renamed[stored[id(tensor)][1]] = target
    return renamed.get


def _loads_itself(part: nn.Module) -> bool:
    """Return whether code outside PyTorch overrides ``_load_from_state_dict``, which then calls the hooks."""
    for kind in type(part).__mro__:
        if "_load_from_state_dict" in vars(kind):
            return not kind.__module__.startswith("torch.")
    return False


def _without_memory(part: nn.Module) -> nn.Module:
    """Return a copy with meta tensors of the same names and shapes, for ``_load_from_state_dict`` to write to."""
    stand_in = copy(part)
    for held in ("_parameters", "_buffers"):
        meta = {name: None if own is None else _meta(own) for name, own in vars(part)[held].items()}
        vars(stand_in)[held] = meta
    return stand_in


def _meta(own: Tensor) -> Tensor:
    empty = torch.empty(own.shape, dtype=own.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(own, nn.Parameter) else empty


def has_post_hooks(module: nn.Module) -> bool:
    """Return whether the module has hooks that run when all values are there."""
    return any(part._load_state_dict_post_hooks for part in module.modules())


def run_post_hooks(module: nn.Module) -> None:
    """Run the hooks that ``load_state_dict`` runs at its end, those of inner modules before those of outer ones."""
    for part in reversed(list(module.modules())):
        for hook in list(part._load_state_dict_post_hooks.values()):
            hook(part, _IncompatibleKeys([], []))


def check_extra_state(module: nn.Module) -> None:
    """Raise WeightsError if a submodule has extra state, which only ``load_state_dict`` can load."""
    for name, part in module.named_modules():
        if type(part).set_extra_state is not nn.Module.set_extra_state:
            raise WeightsError(
                f"module {name!r} of the factory has extra state (set_extra_state), which is not loaded; expected "
                "tensors only, or strict=False"
            )
