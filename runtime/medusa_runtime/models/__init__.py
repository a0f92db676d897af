"""Model families, one file each. Their attributes have the names of the checkpoint's tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from medusa_runtime.models.architectures import ARCHITECTURES
from medusa_runtime.models.registry import model_config

if TYPE_CHECKING:
    from medusa_runtime.models.base import Attention, DecoderModel, ModelConfig

__all__ = ["ARCHITECTURES", "Attention", "DecoderModel", "ModelConfig", "model_config"]

_NEED_TORCH = ("Attention", "DecoderModel", "ModelConfig")


def __getattr__(name: str) -> Any:
    """Import torch at the first use of a name that needs it. Finding out which model a checkpoint has needs none."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from medusa_runtime.models import base

    return getattr(base, name)
