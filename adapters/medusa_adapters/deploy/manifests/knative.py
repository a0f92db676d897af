"""A function as a Knative Service (serving.knative.dev/v1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_runtime.errors import ConfigError

from . import features, network_policy, node_agent, scaling, values
from .function import Function

PORT = 8080
MOST_TIMEOUT_S = 600  # unless the cluster raises max-revision-timeout-seconds
LEAST_TIMEOUT_S = 60  # also the pod's termination grace; queue-proxy alone may take 30 s of it
_QUIET_S = 30  # queue-proxy holds SIGTERM back until no request came for so long
_USER = 1000
_RESERVED = {"PORT", "K_SERVICE", "K_CONFIGURATION", "K_REVISION"}


@dataclass(frozen=True)
class Placement:
    """Where instances run and what each has of a node."""

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
    secrets: Sequence[str] = ()  # whose entries become environment variables
    node_agent: bool = False


def service(function: Function, placement: Placement) -> dict[str, Any]:
    """The Service, checked; ConfigError for what the CRD leaves unchecked and the cluster would refuse."""
    reserved = _RESERVED & set(function.env)
    if reserved:
        raise ConfigError(f"--env {', '.join(sorted(reserved))}: Knative sets it itself")
    scale = scaling.scale(
        function.measured,
        concurrency=function.concurrency,
        min_scale=placement.min_scale,
        max_scale=placement.max_scale,
    )
    rendered = {
        "apiVersion": "serving.knative.dev/v1",
        "kind": "Service",
        "metadata": {
            "name": function.name,
            "namespace": placement.namespace,
            "labels": {"app.kubernetes.io/name": function.name, "app.kubernetes.io/managed-by": "medusa"},
        },
        "spec": {"template": {"metadata": {"annotations": scale}, "spec": _pod(function, placement)}},
    }
    features.check(rendered)
    return rendered


def network_policy_of(service: dict[str, Any]) -> dict[str, Any]:
    """For the Service's pods, which Knative labels with its name."""
    return network_policy.of_knative(service["metadata"], {"serving.knative.dev/service": service["metadata"]["name"]})


def _pod(function: Function, placement: Placement) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "containerConcurrency": function.concurrency,
        "timeoutSeconds": function.timeout_s,
        # An answer that is not streamed starts when it is complete. No idle timeout: it counts in the queue, too.
        "responseStartTimeoutSeconds": function.timeout_s,
        "enableServiceLinks": False,
        "containers": [_container(function, placement)],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    if placement.service_account:
        pod["serviceAccountName"] = values.subdomain(placement.service_account, "--service-account")
    else:
        pod["automountServiceAccountToken"] = False
    if placement.node_selector:
        pod["nodeSelector"] = dict(placement.node_selector)
    if placement.tolerations:
        pod["tolerations"] = [dict(toleration) for toleration in placement.tolerations]
    if placement.runtime_class:
        pod["runtimeClassName"] = values.subdomain(placement.runtime_class, "--runtime-class")
    if placement.node_agent:
        pod["volumes"].append(node_agent.volume("Directory"))
    return pod


def _container(function: Function, placement: Placement) -> dict[str, Any]:
    env = {"MEDUSA_DRAIN": str(function.timeout_s - _QUIET_S - 5)} | dict(function.env)
    mounts: list[dict[str, Any]] = [{"name": "tmp", "mountPath": "/tmp"}]
    if placement.node_agent:
        env = {"MEDUSA_NODE_SOCKET": node_agent.SOCKET} | env
        mounts.append(node_agent.mount(read_only=True))
    container: dict[str, Any] = {
        "name": "function",
        "image": function.image,
        "ports": [{"name": "http1", "containerPort": PORT}],
        "env": [{"name": name, "value": value} for name, value in env.items()],
        # No startup probe: it would hold the first look at readiness back by up to a second. Readiness has no period,
        # so that queue-proxy asks every 50 ms; a start of any length only fails it, never kills the container.
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": PORT}, "successThreshold": 1},
        "livenessProbe": {
            "httpGet": {"path": "/livez", "port": PORT},
            "periodSeconds": 10,
            "timeoutSeconds": 2,
            "failureThreshold": 3,
        },
        "resources": _resources(placement),
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": mounts,
    }
    if placement.secrets:
        container["envFrom"] = [{"secretRef": {"name": values.subdomain(s, "--secret")}} for s in placement.secrets]
    return container


def _resources(placement: Placement) -> dict[str, Any]:
    """Memory's limit is its request, so that weights are never what the node takes back; CPU has no limit."""
    requests, limits = {}, {}
    if placement.cpu:
        requests["cpu"] = values.quantity(placement.cpu, "--cpu")
    if placement.memory:
        requests["memory"] = limits["memory"] = values.quantity(placement.memory, "--memory")
    if placement.gpus:
        limits["nvidia.com/gpu"] = str(placement.gpus)
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}
