"""The state of the cluster, for ``medusa cluster status --json`` and the gateway's page."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from ..deployment import Deployment
from ..policy.state import Load
from .execution import Execution
from .models import Models
from .nodes import KnownInstance, KnownNode
from .state import State

_GATEWAY_SHOWN_S = 60.0


def status(state: State, models: Models, execution: Execution) -> dict[str, Any]:
    """Return the cluster's state as JSON, in the form of docs/internals/cluster.md.

    All times in it are what this machine's clock would have shown if it had always gone as now: it may have been set.
    """
    now, now_s = time.time(), time.monotonic()
    fetches = execution.fetches(now_s)
    offset = now - now_s
    loads = state.loads.summed(state.gateways.values(), now_s, state.deployments)
    names = {node.url: node.name for node in state.nodes.values() if node.url}
    transfers = [_transfer(names, node, model) for node in state.nodes.values() for model in _arriving(node)]
    copies = state.copies()
    instances: defaultdict[str, list[KnownInstance]] = defaultdict(list)  # by model
    for instance in state.instances.values():
        instances[instance.model].append(instance)
    return {
        "at": now,
        "nodes": [_node(state, node, offset) for node in sorted(state.nodes.values(), key=lambda node: node.name)],
        "models": [
            _model(models, item, loads.get(name), copies.get(item.url, {}), instances[name])
            | {"answering": _answering(state, instances[name])}
            | _trouble(state, models, execution, item, instances[name])
            for name, item in sorted(state.deployments.items())
        ],
        "transfers": transfers,
        "chains": chains([(fetch.url, fetch.sources[0], fetch.node) for fetch in fetches if fetch.sources]),
        "gateways": [
            {"name": item.name, "url": item.url, "seen": item.seen_at + offset}
            for item in state.gateways.values()
            if now_s - item.seen_at < _GATEWAY_SHOWN_S
        ],
        "events": [{**event, "at": event["at"] + offset} for event in state.events],
    }


def _node(state: State, node: KnownNode, offset: float) -> dict[str, Any]:
    found = {
        name: node.status.get(name, 0)
        for name in (
            *("link_bytes_per_s", "egress_bytes_per_s", "ingress_bytes_per_s"),
            *("memory_bytes", "memory_used_bytes", "devices", "device_bytes"),
        )
    }
    return {
        "name": node.name,
        "address": node.status.get("address", ""),
        "device_kind": node.status.get("device_kind", ""),
        "device_name": node.status.get("device_name", ""),
        "device_free_bytes": node.status.get("device_free_bytes", []),
        "state": state.node_state(node),
        **found,
        "models": node.models() if node.lost_at is None else [],
        "instances": [
            {
                "id": item.id,
                "model": item.model,
                "state": item.state,
                "since": item.since_s + offset,
                "running": item.running,
                "group": item.group,
                "layers": item.layers,
                "role": item.role,
                "helps": item.helps if item.helping else None,
                "revision": item.digest,
                "outdated": state.is_outdated(item),
            }
            for item in state.instances.on(node.name)
        ],
    }


def _model(
    models: Models, item: Deployment, load: Load | None, copies: Mapping[str, Any], instances: list[KnownInstance]
) -> dict[str, Any]:
    ones = [instance for instance in instances if not instance.rank]  # a group counts as one instance, by its leader
    states = ["starting" if one.loading and one.state == "ready" else one.state for one in ones]
    return item.to_json() | {
        "revision": item.digest,
        "instances": states.count("ready"),
        "starting": states.count("starting"),
        "wanted": len(states) - states.count("draining"),
        "copies": [node for node, copy in copies.items() if copy["state"] == "done"],
        "waiting": load.waiting if load else 0,
        "running": load.running if load else 0,
        "tokens_per_s": load.decoded_per_s if load else 0.0,
        "layers": models.layers(item, time.monotonic()),  # how many layers a group may share
        "starts": models.starts(item.url),
        "learned": models.learned(item.url),
    }


def _answering(state: State, instances: Iterable[KnownInstance]) -> int:
    """Return how many instances of the current deployment have been ready to answer.

    Where prefill and decode are apart, it is how many can do each of the two.
    """
    ones = [one for one in instances if one.state == "ready" and one.answers and not one.rank and not one.loading]
    roles = Counter(one.role for one in ones if not state.is_outdated(one))
    return min(roles["prefill"], roles["decode"]) + roles["both"]


def _trouble(
    state: State, models: Models, execution: Execution, item: Deployment, instances: Iterable[KnownInstance]
) -> dict[str, str | None]:
    """Return why the last start of a deployment failed, and in one line what serves in its place; None if nothing."""
    failure = execution.failure(item.name) or models.why_unknown(item.url)
    old = [one for one in instances if state.is_outdated(one) and one.state == "ready" and one.answers and not one.rank]
    if not old:
        return {"failure": failure, "replacing": None}
    revisions = ", ".join(sorted({one.digest for one in old}))
    count = "one instance" if len(old) == 1 else f"{len(old)} instances"
    text = f"{count} of revision {revisions} until one of {item.digest} can answer"
    return {"failure": failure, "replacing": f"{text}; the last try failed: {failure}" if failure else text}


def _arriving(node: KnownNode) -> list[Any]:
    return [model for model in node.models() if model["state"] == "fetching" and node.lost_at is None]


def _transfer(names: Mapping[str, str], node: KnownNode, model: Any) -> dict[str, Any]:
    rate = float(model.get("bytes_per_s", 0))
    left = int(model["total_bytes"]) - int(model["fetched_bytes"])
    sources = [names.get(source.partition("/regions/")[0], source) for source in model.get("sources", ())]
    return {
        "url": model["url"],
        "from": sources[0] if sources else "store",
        "to": node.name,
        "done_bytes": model["fetched_bytes"],
        "total_bytes": model["total_bytes"],
        "bytes_per_s": rate,
        "remaining_s": left / rate if rate > 0 else None,
    }


def chains(hops: list[tuple[str, str, str]]) -> list[dict[str, Any]]:
    """Join hops (URL, from, to) into chains, each beginning at its first source."""
    found: list[dict[str, Any]] = []
    for url in dict.fromkeys(url for url, _, _ in hops):
        following: dict[str, list[str]] = {}
        for _, source, target in (hop for hop in hops if hop[0] == url):
            following.setdefault(source, []).append(target)
        targets = {target for nodes in following.values() for target in nodes}
        for first in sorted(following.keys() - targets):
            found += [{"url": url, "nodes": path} for path in _paths(first, following, ())]
    return found


def _paths(node: str, following: dict[str, list[str]], before: tuple[str, ...]) -> list[list[str]]:
    path = (*before, node)
    nexts = [name for name in following.get(node, ()) if name not in path]
    return [found for name in nexts for found in _paths(name, following, path)] or [list(path)]
