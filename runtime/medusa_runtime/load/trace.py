"""The order in which a module uses its tensors, recorded during one forward (Cicada §3.3)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class ExecutionTrace(TorchFunctionMode):
    """Records each tensor when it is first passed to a function of torch, by any code in this thread.

    ``names`` has the tensors' names by their ids. ``order`` gets the names of the tensors that were used.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self._names = names
        self.order: dict[str, None] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self._note((*args, *(kwargs or {}).values()))
        return func(*args, **(kwargs or {}))

    def ahead_of(self, names: Iterable[str]) -> list[str]:
        """Return the used names in the order of their use, followed by the rest of ``names`` in the order given."""
        return list(dict.fromkeys((*self.order, *names)))

    def _note(self, values: tuple[Any, ...] | list[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                name = self._names.get(id(value))
                if name is not None:
                    self.order[name] = None
            elif type(value) in (tuple, list):
                self._note(value)


def record_execution_order(module: nn.Module, *args: Any, **kwargs: Any) -> list[str]:
    """Return the state dict's names in the order of their first use in ``module(*args, **kwargs)``, unused ones last.

    ``WeightIndex.reordered`` takes this list. A tied tensor is listed under its first name.
    """
    names: dict[int, str] = {}
    persistent = module.state_dict(keep_vars=True)
    for name, tensor in persistent.items():
        names.setdefault(id(tensor), name)
    trace = ExecutionTrace(names)
    with torch.no_grad(), trace:
        module(*args, **kwargs)
    return trace.ahead_of(persistent)
