"""Checks that vLLM does not make: whether the checkpoint has all that the model computes with.

vLLM leaves a parameter that no tensor came for as its memory was, and answers with it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from medusa_runtime.errors import MismatchError

if TYPE_CHECKING:
    from medusa_runtime.checkpoint.index import WeightIndex
    from torch import nn

logger = logging.getLogger(__name__)

_SCALED = ("fp8", "compressed-tensors")  # methods whose weights of 8 bits have scales beside them
_CODES = frozenset(("I8", "F8_E4M3", "F8_E5M2"))
_SHOWN = 3


def check_scales(config: Mapping[str, Any], index: WeightIndex) -> None:
    """Raise MismatchError if a quantized weight of 8 bits has no scale. ``config`` is the parsed config.json."""
    if method_of(config) not in _SCALED:
        return
    tensors = index.tensors
    scaled = {name.rpartition(".")[0] for name in tensors if "scale" in name.rpartition(".")[2]}
    for name, entry in tensors.items():
        module, _, part = name.rpartition(".")
        if part == "weight" and entry.dtype in _CODES and module not in scaled:
            raise MismatchError(f"{module}: expected the tensors weight, weight_scale, found no weight_scale")


def method_of(config: Mapping[str, Any]) -> object:
    """Return the ``quant_method`` of a config.json, or None."""
    found = config.get("quantization_config")
    return found.get("quant_method") if isinstance(found, Mapping) else None


def warn_of_missing(model: nn.Module, loaded: Collection[str]) -> None:
    """Log which of the model's parameters no tensor came for."""
    names = [name for name, parameter in model.named_parameters() if parameter.numel() and name not in loaded]
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        logger.warning(
            "the checkpoint has no tensor for %s%s of vLLM's model, so answers may be nonsense; does its config.json "
            "belong to it?",
            ", ".join(names[:_SHOWN]),
            more,
        )


__all__ = ["check_scales", "method_of", "warn_of_missing"]
