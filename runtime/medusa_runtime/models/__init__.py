"""Decoder families, one file each; attribute names follow the checkpoint's tensor names."""

from __future__ import annotations

from medusa_runtime.models.base import Attention, DecoderModel, ModelConfig
from medusa_runtime.models.registry import ARCHITECTURES, family

__all__ = ["ARCHITECTURES", "Attention", "DecoderModel", "ModelConfig", "build_model"]


def build_model(config: ModelConfig) -> DecoderModel:
    """The model of ``config``, in evaluation mode, its parameters still without memory (see load/skeleton.py)."""
    from medusa_runtime.load.skeleton import skeleton

    with skeleton():
        return family(config.architecture)(config).eval()
