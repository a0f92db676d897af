"""Registers ``--load-format medusa``. vLLM calls this in each of its processes (``vllm.general_plugins``)."""

from __future__ import annotations

_registered = False

LOAD_FORMAT = "medusa"


def register() -> None:
    """Register the loader once; vLLM may call this more often."""
    global _registered
    if _registered:
        return
    _registered = True
    from vllm.model_executor.model_loader import register_model_loader

    from .loader import RegionLoader

    register_model_loader(LOAD_FORMAT)(RegionLoader)
