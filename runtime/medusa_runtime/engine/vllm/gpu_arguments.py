"""How vLLM is configured on a GPU."""

from __future__ import annotations

from typing import Any

from ...config import Settings
from ..decode_graphs import sizes_for

WORKER = "medusa_runtime.engine.vllm.gpu_worker.GpuWorker"


def gpu_arguments(settings: Settings, *, compiled: bool) -> dict[str, Any]:
    """Of EngineArgs: our worker, and full graphs of decodes for MEDUSA's batch sizes; those that can be restored.

    Piecewise graphs belong to compiled models, and are vLLM's own: each holds a piece of one of its compiled functions.
    """
    compilation: dict[str, Any] = {"cudagraph_capture_sizes": list(sizes_for(settings.max_concurrency))}
    if not compiled:
        compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return {"worker_cls": WORKER, "enforce_eager": False, "compilation_config": compilation}


def free_bytes() -> int:
    """What the GPU has free, beside what this process has taken."""
    import torch

    return int(torch.cuda.mem_get_info()[0])


__all__ = ["WORKER", "free_bytes", "gpu_arguments"]
