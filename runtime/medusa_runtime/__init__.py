"""The cold start: fetch, load, run. Knows nothing of HTTP, platforms or user code."""

from __future__ import annotations

from . import registry

__version__ = "0.1.0"

# The engine of this package. Others register theirs above it: see ``registry``.
registry.register(
    registry.EngineKind(
        "torch",
        open="medusa_runtime.engine.factory:open_engine",
        preimport="medusa_runtime.engine.preimport:preimport",
        distributions=("medusa_runtime",),
        artifacts=("kv-plan", "cuda-graphs"),
        profile="medusa_runtime.engine.torch.profile:profile",
        captures={"cuda-graphs": "medusa_runtime.engine.gpu.graph_capture:capture"},
        graph_capture="medusa_runtime.engine.gpu.graph_capture",
        owns_gpu_context=True,
        adapters="medusa_runtime.config:adapters",
    )
)
