"""The container and the pod of a function, common to all platforms on Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .. import values
from ..function import Function
from . import node_agent
from .pod_spec import CONFINED, allowed_nodes
from .secret import Secret, environment, sources

PORT = 8080
USER = 1000
LIVENESS = {
    "httpGet": {"path": "/livez", "port": PORT},
    "periodSeconds": 10,
    "timeoutSeconds": 2,
    "failureThreshold": 3,
}


@dataclass(frozen=True)
class Placement:
    """Where instances run, and which resources of a node each has."""

    namespace: str = "default"
    cpu: str | None = None
    memory: str | None = None
    gpus: int = 0
    min_scale: int = 0
    max_scale: int = 0  # 0: no limit
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, str]] = ()
    runtime_class: str | None = None
    service_account: str | None = None
    secrets: Sequence[Secret] = ()
    pull_secrets: Sequence[str] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    node_agent: bool = False


def metadata(function: Function, placement: Placement) -> dict[str, Any]:
    """Return name, namespace, labels and annotations of a function's objects."""
    found: dict[str, Any] = {
        "name": function.name,
        "namespace": placement.namespace,
        "labels": {
            **placement.labels,
            "app.kubernetes.io/name": function.name,
            "app.kubernetes.io/managed-by": "medusa",
        },
    }
    return found | ({"annotations": dict(placement.annotations)} if placement.annotations else {})


def container(
    function: Function, placement: Placement, *, drain_s: int, readiness: Mapping[str, Any], name: str = "function"
) -> dict[str, Any]:
    """Return the container. Its root is read-only, and it has no capabilities.

    ``drain_s`` is how long running requests may continue after SIGTERM.
    """
    env = {"MEDUSA_DRAIN": str(drain_s)} | dict(function.env)
    mounts: list[dict[str, Any]] = [{"name": "tmp", "mountPath": "/tmp"}]
    if placement.node_agent:
        env = {"MEDUSA_NODE_SOCKET": node_agent.SOCKET} | env
        mounts.append(node_agent.mount(read_only=True))
    found: dict[str, Any] = {
        "name": name,
        "image": function.image,
        "ports": [{"name": "http1", "containerPort": PORT}],
        "env": environment(env, placement.secrets),
        "readinessProbe": dict(readiness),
        "livenessProbe": dict(LIVENESS),
        "resources": resources(placement),
        "securityContext": {"runAsNonRoot": True, "runAsUser": USER, **CONFINED},
        "volumeMounts": mounts,
    }
    if from_secrets := sources(placement.secrets):
        found["envFrom"] = from_secrets
    return found


def pod(placement: Placement, container: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod around a container: its volumes, and which nodes may run it."""
    found: dict[str, Any] = {
        "enableServiceLinks": False,
        "containers": [dict(container)],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    if placement.service_account:
        found["serviceAccountName"] = values.subdomain(placement.service_account, "--service-account")
    else:
        found["automountServiceAccountToken"] = False
    found |= allowed_nodes(placement.pull_secrets, placement.node_selector, placement.tolerations)
    if placement.runtime_class:
        found["runtimeClassName"] = values.subdomain(placement.runtime_class, "--runtime-class")
    if placement.node_agent:
        found["volumes"].append(node_agent.volume("Directory"))
    return found


def resources(placement: Placement) -> dict[str, Any]:
    """Return requests and limits. Memory's limit is its request, so the node never evicts weights. CPU has no limit."""
    requests, limits = {}, {}
    if placement.cpu:
        requests["cpu"] = values.quantity(placement.cpu, "--cpu")
    if placement.memory:
        requests["memory"] = limits["memory"] = values.memory(placement.memory, "--memory")
    if placement.gpus:
        limits["nvidia.com/gpu"] = str(placement.gpus)
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}
