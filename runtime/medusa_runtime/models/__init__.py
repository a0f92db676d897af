"""Decoder families, one file each; attribute names follow the checkpoint's tensor names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from medusa_runtime.models.registry import ARCHITECTURES, family

if TYPE_CHECKING:
    from medusa_runtime.models.base import Attention, DecoderModel, ModelConfig

__all__ = ["ARCHITECTURES", "Attention", "DecoderModel", "ModelConfig", "build_model"]

_OF_TORCH = ("Attention", "DecoderModel", "ModelConfig")


def __getattr__(name: str) -> Any:
    """Imports torch with the first of these names; what only decides which model it is does without."""
    if name not in _OF_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from medusa_runtime.models import base

    return getattr(base, name)


def build_model(config: ModelConfig) -> DecoderModel:
    """The model of ``config``, in evaluation mode, its parameters still without memory (see load/skeleton.py)."""
    from medusa_runtime.load.skeleton import skeleton

    with skeleton():
        return family(config.architecture)(config).eval()
