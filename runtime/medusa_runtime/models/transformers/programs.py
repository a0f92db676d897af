"""Decoder layers of transformers that may be recorded (``..programs``)."""

from __future__ import annotations

import functools
from typing import Any, cast

from torch import Tensor, nn

from ..programs import Programs
from .attention import Step

PROGRAMS = "medusa_programs"  # the attribute of a layer of transformers that holds its model's ``Programs``


def use_programs(module: nn.Module, step: Step) -> None:
    """Let the layers of a module be recorded, if we know the formula of their attention."""
    programs = Programs()
    for part in list(module.modules()):
        if any(hasattr(child, "medusa_formula") for child in part.children()):
            setattr(part, PROGRAMS, (programs, step))
            part.__class__ = _recorded(cast(Any, type(part)))


@functools.cache
def _recorded(kind: Any) -> type:
    def forward(self: Any, hidden_states: Tensor, *others: Any, **more: Any) -> Any:
        programs, step = getattr(self, PROGRAMS)
        rotation = more.get("position_embeddings")
        if others or hidden_states.dim() != 3 or not (rotation is None or _is_pair(rotation)):
            return kind.forward(self, hidden_states, *others, **more)
        return programs.run(
            self,
            hidden_states,
            step.attention,
            None if rotation is None else step.rotation(*rotation),
            lambda: kind.forward(self, hidden_states, **more),
            tuple(None if isinstance(value, (Tensor, tuple)) else value for value in more.values()),
        )

    return type(kind.__name__, (kind,), {"forward": forward})


def _is_pair(rotation: Any) -> bool:
    return isinstance(rotation, tuple) and len(rotation) == 2


__all__ = ["use_programs"]
