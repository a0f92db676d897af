"""The cluster's state in the form that the policy takes."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..deployment import DEVICES, GPU_GROUP_ENGINES, Deployment
from ..policy import state as policy
from ..policy.accelerators import left_over
from .live import Live
from .models import Models
from .nodes import KnownFetch, KnownInstance, KnownNode
from .state import State


def policy_state(
    state: State, models: Models, live: Live, fetches: Iterable[KnownFetch], loads: Mapping[str, policy.Load]
) -> policy.ClusterState:
    """Return the state for the policy. It includes instances and fetches that no node has confirmed yet."""
    instances: dict[str, list[KnownInstance]] = {}
    for item in state.instances.values():
        instances.setdefault(item.node, []).append(item)
    decoding = {item.helps for item in state.instances.values() if item.helping and item.role == "prefill"}
    decoding &= {item.id for item in state.instances.values() if item.running}
    decided: dict[str, list[KnownFetch]] = {}
    for fetch in fetches:
        decided.setdefault(fetch.node, []).append(fetch)
    stand_ins = state.stand_ins()
    outdated = {item.id for item in state.instances.values() if state.is_outdated(item)}
    leaving = state.leaving()
    alive = [node for node in state.nodes.values() if node.lost_at is None]
    copies = state.copies()
    processors = {device: {node.processor(device) for node in alive} for device in DEVICES}
    return policy.ClusterState(
        nodes={
            name: _policy_node(
                node,
                instances.get(name, []),
                decided.get(name, []),
                decoding=decoding,
                outdated=outdated,
                stand_ins=stand_ins,
                draining=name in leaving,
                drain_s=state.draining.get(name),
            )
            for name, node in state.nodes.items()
            if node.status
        },
        deployments={
            name: _policy_deployment(
                item, state, models, live, copies.get(item.url, {}).values(), processors[item.device]
            )
            for name, item in state.deployments.items()
        },
        loads=_with_kv_use(loads, state.instances.values()),
    )


def _with_kv_use(loads: Mapping[str, policy.Load], instances: Iterable[KnownInstance]) -> dict[str, policy.Load]:
    """Add to the loads which part of the KV blocks is in use, of all instances that have requests of their own."""
    uses: dict[str, list[float]] = {}
    for item in instances:
        if item.state == "ready" and not item.loading and item.role != "prefill":
            uses.setdefault(item.model, []).append(item.kv_use)
    return {
        name: replace(load, kv_use=sum(uses[name]) / len(uses[name])) if name in uses else load
        for name, load in loads.items()
    }


def _policy_node(
    node: KnownNode,
    instances: list[KnownInstance],
    fetches: list[KnownFetch],
    *,
    decoding: Collection[str | None],
    outdated: Collection[str],
    stand_ins: Collection[str],
    draining: bool,
    drain_s: float | None,
) -> policy.Node:
    status = node.status
    free = _free_devices(node, instances)
    away = node.lost_at is not None or node.silent or not node.reached
    state: policy.NodeState = "lost" if away else "draining" if draining else "alive"
    return policy.Node(
        name=node.name,
        address=str(status.get("address", "")),
        state=state,
        drain_s=drain_s,
        leaf=str(status.get("leaf", "")),
        link_bytes_per_s=float(status.get("link_bytes_per_s", 1e9)),
        memory_bytes=int(status.get("memory_bytes", 0)),
        memory_used_bytes=int(status.get("memory_used_bytes", 0)),
        devices=int(status.get("devices", 0)),
        devices_lost=int(status.get("devices_lost", 0)),
        devices_apart=bool(status.get("devices_apart")),
        device_kind=str(status.get("device_kind", "")),
        device_name=str(status.get("device_name", "")),
        device_bytes=int(status.get("device_bytes", 0)),
        device_sizes=tuple(map(int, status.get("device_sizes", ()))),
        device_free_bytes=tuple(one.free_bytes for one in free),
        device_free_sizes=tuple(one.size_bytes for one in free),
        load_bytes_per_s=float(status.get("load_bytes_per_s", math.inf)),
        stays=bool(status.get("head")),
        spare=node.spare,
        serves_out=any(item.helping and item.role == "prefill" and item.helps in decoding for item in instances),
        serves_in=any(item.id in decoding for item in instances),
        pace_bytes_per_s=status.get("pace_bytes_per_s"),
        copies=_copies(node, fetches),
        instances=tuple(
            policy.Instance(
                id=item.id,
                model=item.model,
                node=item.node,
                # To the policy, workers are starting until their leader has all layers and the group can consolidate,
                # and of two deployments under one name, those that do not answer yet.
                state="starting" if item.loading or _is_late(item, stand_ins, outdated) else item.state,  # type: ignore[arg-type]
                since_s=item.since_s,
                role=item.role,  # type: ignore[arg-type]
                layers=item.layers,
                group=item.group,
                full=item.full,
                running=item.running,
                version=item.version,
                slots=item.slots,
                device=item.device,
                deserted=item.deserted,
                changed=item.id in outdated,
                url=item.url,
            )
            for item in instances
        ),
    )


def _is_late(item: KnownInstance, stand_ins: Collection[str], outdated: Collection[str]) -> bool:
    """Return whether an instance listens, but is not used yet, or never will be, in place of another one."""
    return item.state == "ready" and (item.id in stand_ins or (item.id in outdated and not item.answers))


def _free_devices(node: KnownNode, instances: list[KnownInstance]) -> tuple[policy.FreeDevice, ...]:
    """Return a node's GPUs that no instance has, also none that the node does not show yet."""
    free_bytes = list(map(int, node.status.get("device_free_bytes", ())))
    sizes = list(map(int, node.status.get("device_free_sizes", ())))
    if len(sizes) != len(free_bytes):
        sizes = [int(node.status.get("device_bytes", 0))] * len(free_bytes)
    free = tuple(map(policy.FreeDevice, free_bytes, sizes))
    for item in instances:
        if not item.confirmed and node.processor(item.device).on_gpu:
            free = left_over(free, item.slots, item.device_bytes)
    return free


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


def _policy_deployment(
    item: Deployment,
    state: State,
    models: Models,
    live: Live,
    copies: Collection[Mapping[str, Any]],
    processors: Collection[policy.Processor],
) -> policy.Deployment:
    sizes = [int(copy["total_bytes"]) for copy in copies]
    return policy.Deployment(
        name=item.name,
        url=item.url,
        engine=item.engine,
        size_bytes=max(sizes, default=0) or models.size_bytes(item.url),
        version=state.versions.current(item.url, copies),
        min=item.min,
        max=item.max,
        ttft_slo_s=item.ttft_slo_s or math.inf,
        tpot_slo_s=item.tpot_slo_s or math.inf,
        layers=models.layers(item, time.monotonic()),
        times=models.times(item.url),
        measured=models.measured(item.url, processors),
        tokens_per_s=models.prefill_tokens_per_s(item.url),
        concurrency=int(item.settings.get("max_concurrency", 8)),
        weight=item.weight,
        device_kind=item.device_kind,
        device=item.device,
        devices=item.gpus,
        kv_bytes=item.kv_bytes(models.kv_bytes_per_token(item.url)),
        gpu_groups=item.engine in GPU_GROUP_ENGINES,
        disaggregated=models.is_apart(item),
        may_prefill=live.may_prefill(item),
    )
