"""The cold start on one machine: fetch, load, run. It knows nothing of HTTP servers, platforms or user code."""

from __future__ import annotations

from . import registry

__version__ = "0.1.0"

# The engine of this package. Packages above it register theirs in the same way: see ``registry``.
registry.register(
    registry.EngineKind(
        "torch",
        open="medusa_runtime.engine.factory:open_engine",
        preimport="medusa_runtime.engine.preimport:preimport",
        distributions=("medusa_runtime",),
        artifacts=("kv-plan", "prompts", "prompt-kv", "cuda-graphs"),
        profile="medusa_runtime.engine.torch.profile:profile",
        captures={"cuda-graphs": "medusa_runtime.engine.gpu.graph_capture:capture"},
        graph_capture="medusa_runtime.engine.gpu.graph_capture",
        owns_gpu_context=True,
        check="medusa_runtime.engine.preflight:check",
        adapters="medusa_runtime.config:adapters",
    )
)
