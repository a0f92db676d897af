"""Many machines: weights travel between nodes, and models scale with their load. On Ray, which this does not import.

Importing this package makes ``--engine cluster`` known: a function whose engine is a model that the cluster serves.
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
