"""What turns prompts into tokens: the protocol all engines speak, and this package's own, the torch engine."""

from __future__ import annotations

from ..registry import EngineKind
from ..registry import register as _register


def register() -> None:
    """Make ``--engine torch`` known."""
    _register(
        EngineKind(
            "torch",
            open="medusa_runtime.engine.factory:open_engine",
            preimport="medusa_runtime.engine.preimport:preimport",
            distributions=("medusa_runtime",),
            artifacts=("kv-plan", "cuda-graphs"),
            profile="medusa_runtime.engine.torch.profile:profile",
            captures={"cuda-graphs": "medusa_runtime.engine.gpu.graph_capture:capture"},
            graph_capture="medusa_runtime.engine.gpu.graph_capture",
            owns_gpu_context=True,
        )
    )


__all__ = ["register"]
