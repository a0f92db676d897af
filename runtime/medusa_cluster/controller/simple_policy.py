"""One instance for a model that is asked for, where most memory is free."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from ..policy.state import ClusterState, Decision, StartInstance, StopInstance


@dataclass(frozen=True)
class Memory:
    pass


def decide(state: ClusterState, now_s: float, memory: Memory) -> tuple[list[Decision], Memory]:
    found: list[Decision] = []
    for name, deployment in state.deployments.items():
        instances = [item for node in state.nodes.values() for item in node.instances if item.model == name]
        settled = [item for item in instances if item.state != "draining" and state.nodes[item.node].state == "alive"]
        load = state.loads.get(name)
        wanted = max(deployment.min, 1 if load and load.waiting else 0)
        alive = [node for node in state.nodes.values() if node.state == "alive"]
        for _ in range(wanted - len(settled)):
            if alive:
                node = max(alive, key=lambda node: (-len(node.instances), node.free_bytes))
                found.append(StartInstance(f"{name}-{secrets.token_hex(3)}".replace("/", "-"), name, node.name))
        if any(item.state == "ready" for item in settled):
            leaving = [
                item for item in instances if item.state == "ready" and state.nodes[item.node].state == "draining"
            ]
            found += [StopInstance(item.id, item.node, reason="its node drains") for item in leaving]
        found += [StopInstance(item.id, item.node) for item in settled[deployment.max :]]
    return found, memory
