"""The cluster's state in the form that the policy takes."""

from __future__ import annotations

import math
import time
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING

from ..policy import state as policy
from .nodes import Gateway, KnownFetch, KnownInstance, KnownNode

if TYPE_CHECKING:
    from ..deployment import Deployment
    from .cluster import Cluster

_GATEWAY_GONE_S = 2.0  # the loads of a gateway without a report for so long no longer count


class Loads:
    """The gateways' loads, summed by model, with the time of each model's last request."""

    def __init__(self) -> None:
        self._last_request: dict[str, float] = {}

    def keep(self, deployed: Container[str]) -> None:
        """Forget all models but these."""
        self._last_request = {model: at for model, at in self._last_request.items() if model in deployed}

    def summed(self, gateways: Iterable[Gateway], now: float, deployed: Container[str]) -> dict[str, policy.Load]:
        """Return the loads of the ``deployed`` models, by name."""
        sums: dict[str, dict[str, float]] = {model: {} for model in self._last_request}
        for gateway in gateways:
            if now - gateway.seen_at > _GATEWAY_GONE_S:
                continue
            for model, load in gateway.loads.items():
                if model not in deployed:
                    continue
                total = sums.setdefault(model, {})
                for name in ("waiting", "running", "tokens_per_s", "prefilled_per_s", "decoded_per_s"):
                    total[name] = total.get(name, 0.0) + float(load.get(name) or 0)
                for name in ("kv_use", "longest_wait_s"):
                    total[name] = max(total.get(name, 0.0), float(load.get(name) or 0))
                if load.get("waiting") or load.get("running") or load.get("decoded_per_s"):
                    self._last_request[model] = now
        return {
            model: policy.Load(
                waiting=int(total.get("waiting", 0)),
                running=int(total.get("running", 0)),
                tokens_per_s=total.get("tokens_per_s", 0.0),
                prefilled_per_s=total.get("prefilled_per_s", 0.0),
                decoded_per_s=total.get("decoded_per_s", 0.0),
                kv_use=total.get("kv_use", 0.0),
                longest_wait_s=total.get("longest_wait_s", 0.0),
                last_request_s=self._last_request.get(model, -math.inf),
            )
            for model, total in sums.items()
        }


def policy_state(
    cluster: Cluster, fetches: Iterable[KnownFetch], loads: Mapping[str, policy.Load]
) -> policy.ClusterState:
    """Return the state for the policy. It includes instances and fetches that no node has confirmed yet."""
    instances: dict[str, list[KnownInstance]] = {}
    for item in cluster.instances.values():
        instances.setdefault(item.node, []).append(item)
    decided: dict[str, list[KnownFetch]] = {}
    for fetch in fetches:
        decided.setdefault(fetch.node, []).append(fetch)
    leaving, offset = cluster.leaving(), time.monotonic() - time.time()
    return policy.ClusterState(
        nodes={
            name: _policy_node(
                node,
                instances.get(name, []),
                decided.get(name, []),
                draining=name in leaving,
                drain_s=cluster.draining.get(name),
                offset=offset,
            )
            for name, node in cluster.nodes.items()
            if node.status
        },
        deployments={name: _policy_deployment(item, cluster) for name, item in cluster.deployments.items()},
        loads=dict(loads),
    )


def _policy_node(
    node: KnownNode,
    instances: list[KnownInstance],
    fetches: list[KnownFetch],
    *,
    draining: bool,
    drain_s: float | None,
    offset: float,
) -> policy.Node:
    status = node.status
    away = node.lost_at is not None or node.silent or not node.reached
    state: policy.NodeState = "lost" if away else "draining" if draining else "alive"
    return policy.Node(
        name=node.name,
        address=str(status.get("address", "")),
        state=state,
        drain_s=drain_s,
        leaf=str(status.get("leaf", "")),
        link_bytes_per_s=float(status.get("link_bytes_per_s", 1e9)),
        egress_bytes_per_s=float(status.get("egress_bytes_per_s", 0)),
        ingress_bytes_per_s=float(status.get("ingress_bytes_per_s", 0)),
        memory_bytes=int(status.get("memory_bytes", 0)),
        memory_used_bytes=int(status.get("memory_used_bytes", 0)),
        devices=int(status.get("devices", 0)),
        stays=bool(status.get("head")),
        spare=node.spare,
        serves_out=any(item.running for item in instances) and any(item.role == "prefill" for item in instances),
        copies=_copies(node, fetches),
        instances=tuple(
            policy.Instance(
                id=item.id,
                model=item.model,
                node=item.node,
                # To the policy, workers are starting until their leader has all layers and the group can consolidate.
                state="starting" if item.loading else item.state,  # type: ignore[arg-type]
                since_s=item.since + offset,
                role=item.role,  # type: ignore[arg-type]
                layers=item.layers,
                group=item.group,
                full=item.full,
                running=item.running,
                version=item.version,
            )
            for item in instances
        ),
    )


def _copies(node: KnownNode, fetches: list[KnownFetch]) -> tuple[policy.Copy, ...]:
    decided = {fetch.url: fetch for fetch in fetches}
    found = {
        model["url"]: policy.Copy(
            url=model["url"],
            total_bytes=int(model["total_bytes"]),
            fetched_bytes=int(model["fetched_bytes"]),
            version=str(model.get("version", "")),
            pinned=bool(model["pinned"]),
            used_at_s=time.monotonic() - float(model.get("idle_s", 0)),
            layers=decided[model["url"]].layers if model["url"] in decided else None,
            sources=decided[model["url"]].sources if model["url"] in decided else (),
            bytes_per_s=float(model.get("bytes_per_s", 0)),
        )
        for model in node.models()
        if model.get("state") != "failed"
    }
    for url, fetch in decided.items():
        found.setdefault(url, policy.Copy(url, 0, 0, layers=fetch.layers, pinned=fetch.pin, sources=fetch.sources))
    return tuple(found.values())


def _policy_deployment(item: Deployment, cluster: Cluster) -> policy.Deployment:
    alive = [node for node in cluster.nodes.values() if node.lost_at is None]
    sizes = [int(model["total_bytes"]) for node in alive for model in node.models() if model["url"] == item.url]
    return policy.Deployment(
        name=item.name,
        url=item.url,
        engine=item.engine,
        size_bytes=max(sizes, default=0) or cluster.models.size_bytes(item.url),
        version=cluster.versions.current(item.url, alive),
        min=item.min,
        max=item.max,
        ttft_slo_s=item.ttft_slo_s or math.inf,
        tpot_slo_s=item.tpot_slo_s or math.inf,
        layers=cluster.models.layers(item, time.monotonic()),
        times=cluster.models.times(item.url),
        hop_s=cluster.models.hop_s(item.url),
        concurrency=int(item.settings.get("max_concurrency", 8)),
    )
