"""How vLLM is configured on a GPU."""

from __future__ import annotations

import logging
from typing import Any

from medusa_runtime.config import Settings
from medusa_runtime.engine.gpu.decode_graphs import sizes_for

logger = logging.getLogger(__name__)

WORKER = "medusa_vllm.gpu.worker.GpuWorker"
_REPLACED = {"enforce_eager": "--enforce-eager", "compilation_config": "--compilation-config"}


def gpu_arguments(settings: Settings, *, compiled: bool) -> dict[str, Any]:
    """Return the part of EngineArgs for a GPU: our worker, and full graphs of decodes for MEDUSA's batch sizes.

    Piecewise graphs belong to compiled models and are vLLM's own: each holds a piece of one of its compiled functions.
    """
    compilation: dict[str, Any] = {"cudagraph_capture_sizes": list(sizes_for(settings.max_concurrency))}
    if not compiled:
        compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return {"worker_cls": WORKER, "enforce_eager": False, "compilation_config": compilation}


def warn_of_unused_flags(given: dict[str, Any]) -> None:
    """Log which of the user's flags of ``vllm serve`` the arguments for a GPU replace."""
    unused = [flag for name, flag in _REPLACED.items() if given.get(name)]
    if unused:
        logger.warning("%s of vllm serve: not used on a GPU, where medusa has graphs of its own", ", ".join(unused))


def bundle_arguments(settings: Settings) -> dict[str, str | None]:
    """Return the part of ``model_loader_extra_config`` that names the bundle, and says whether to use it.

    A worker also records in the bundle's quarantine that a graph broke the context. The flags decide which kernels it
    needs.
    """
    return {
        "medusa_model": settings.model,
        "medusa_state": settings.state,
        "medusa_graphs": settings.graphs,
        "medusa_flags": settings.vllm_args,
    }


__all__ = ["WORKER", "bundle_arguments", "gpu_arguments", "warn_of_unused_flags"]
