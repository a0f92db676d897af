"""Registers ``--load-format medusa`` and ``medusa-tensors``, as a plugin that each of vLLM's processes calls."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping

logger = logging.getLogger(__name__)

_registered = False

LOAD_FORMAT = "medusa"
ANY_VERSION_FORMAT = "medusa-tensors"
GROUP = "vllm.general_plugins"  # the entry points that vLLM calls
PLUGINS = "VLLM_PLUGINS"  # the names of those that it may call
_NAME = "medusa"


def name_plugin(environment: MutableMapping[str, str]) -> None:
    """Have vLLM's processes call this plugin, too, where a user names the plugins to call. None else is by default.

    Others may import anything.
    """
    named = environment.get(PLUGINS)
    if _NAME not in (named or "").split(","):
        environment[PLUGINS] = f"{named},{_NAME}" if named else _NAME


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
