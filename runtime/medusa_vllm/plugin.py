"""Registers ``--load-format medusa`` and ``medusa-tensors``, as a plugin that each of vLLM's processes calls."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

_registered = False

LOAD_FORMAT = "medusa"
ANY_VERSION_FORMAT = "medusa-tensors"


def register() -> None:
    """Register the loaders once; vLLM may call this more often."""
    global _registered
    if _registered:
        return
    _registered = True
    from vllm.model_executor.model_loader import register_model_loader

    from .compatible.loader import TensorLoader

    register_model_loader(ANY_VERSION_FORMAT)(TensorLoader)
    try:
        from .weights.loader import RegionLoader
    except (ImportError, AttributeError) as error:  # another version of vLLM, which is served in the compatible mode
        logger.debug("--load-format %s is not available: %s", LOAD_FORMAT, error)
    else:
        register_model_loader(LOAD_FORMAT)(RegionLoader)
