"""Helpers of the trials in ``faster``, ``faster_attention`` and ``experts``.

A trial calls a module's own forward with random numbers, and compares the result with that of a formula that we know.
"""

from __future__ import annotations

from typing import Any

from torch import nn

# What the rows of a trial's input are multiplied with: some classes limit large values, or add eps in another place,
# which shows beside small ones.
SCALES = (1.0, 1e-3, 1e3)
_PLAIN = (int, float, str, tuple, list, type(None))

Tried = dict[Any, Any]
"""The results of the trials for one model, by ``kind_of``. Another model may have other settings in its config."""


def kind_of(part: nn.Module) -> tuple[Any, ...]:
    """Return what modules of one model have in common if they compute alike: class, plain attributes, and parts."""
    plain = {name: value for name, value in vars(part).items() if isinstance(value, _PLAIN) and name != "layer_idx"}
    return type(part), repr(sorted(plain.items())), tuple(type(child) for child in part.children())


__all__ = ["SCALES", "Tried", "kind_of"]
