"""A function as a plain Deployment and a Service, and what scales it: an HPA, or KEDA."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from medusa_runtime.errors import ConfigError

from ..function import Function
from . import network_policy, pod
from .pod import Placement

AUTOSCALERS = ("hpa", "keda", "keda-http", "none")
_LEAST_COOLDOWN_S, _MOST_COOLDOWN_S = 60, 3600
_STARTS = 10  # as in scaling.py: idle for ten times as long as coming back takes
_DEFAULT_COOLDOWN_S = 300
_MOST_INSTANCES = 10  # unless --max-scale says otherwise: an HPA must have a limit
_CPU_PERCENT = 80
_LEAVING_S = 5  # how long after SIGTERM is due other nodes still send requests
_UTILIZATION = 0.7


@dataclass(frozen=True)
class Scaling:
    """The autoscaler, and where it gets the load from.

    ``prometheus``: the address of a Prometheus that scrapes the pods, for ``keda``; ``hosts``: the names whose requests
    KEDA's HTTP add-on passes on, for ``keda-http``.
    """

    autoscaler: str = "hpa"
    prometheus: str | None = None
    hosts: tuple[str, ...] = ()


def check(scaling: Scaling, placement: Placement) -> None:
    """Raise ConfigError for an autoscaler that could not work with these values."""
    kind = scaling.autoscaler
    if kind == "hpa" and not placement.cpu:
        raise ConfigError(
            "--autoscaler hpa needs --cpu: it compares the CPU that instances use with what they ask for; or choose "
            f"{', '.join(AUTOSCALERS[1:])}"
        )
    if (kind == "keda") is (scaling.prometheus is None):
        needs, found = ("needs", "none") if kind == "keda" else ("takes no", scaling.prometheus)
        raise ConfigError(f"--autoscaler {kind} {needs} --prometheus, the address that KEDA asks; found {found}")
    if scaling.prometheus is not None and not scaling.prometheus.startswith(("http://", "https://")):
        raise ConfigError(f"--prometheus={scaling.prometheus!r} cannot be used: expected http://… or https://…")
    if (kind == "keda-http") is (not scaling.hosts):
        needs = "needs" if kind == "keda-http" else "takes no"
        raise ConfigError(f"--autoscaler {kind} {needs} --host, whose requests KEDA's HTTP add-on passes on")


def least_instances(scaling: Scaling, placement: Placement) -> int:
    """Return how few instances there may be. Only the HTTP add-on holds requests while there is none."""
    return placement.min_scale if scaling.autoscaler == "keda-http" else max(1, placement.min_scale)


def manifests(function: Function, placement: Placement, scaling: Scaling) -> list[dict[str, Any]]:
    """Return the Deployment, the Service, and the autoscaler's object."""
    where = pod.metadata(function, placement)
    found = [_deployment(function, placement, scaling, where), _service(function, where)]
    if scaling.autoscaler == "hpa":
        found.append(_hpa(function, placement, scaling, where))
    elif scaling.autoscaler == "keda":
        found.append(_scaled_object(function, placement, scaling, where))
    elif scaling.autoscaler == "keda-http":
        found.append(_http_scaled_object(function, placement, scaling, where))
    return found


def network_policy_of(function: Function, placement: Placement) -> dict[str, Any]:
    """Return a policy by which only pods of the function's own namespace may connect to it."""
    return network_policy.of_namespace(pod.metadata(function, placement), _selector(function))


def _selector(function: Function) -> dict[str, str]:
    return {"app.kubernetes.io/name": function.name}


def _deployment(function: Function, placement: Placement, scaling: Scaling, where: dict[str, Any]) -> dict[str, Any]:
    container = pod.container(
        function,
        placement,
        drain_s=function.timeout_s,
        # A failing one kills nothing, so a start may take as long as it likes.
        readiness={"httpGet": {"path": "/readyz", "port": pod.PORT}, "periodSeconds": 1, "timeoutSeconds": 2},
    )
    # Requests still come until every node knows that the pod is ending.
    container["lifecycle"] = {"preStop": {"exec": {"command": ["sleep", str(_LEAVING_S)]}}}
    template: dict[str, Any] = {"labels": where["labels"]}
    if placement.annotations:
        template["annotations"] = dict(placement.annotations)
    spec = {
        "terminationGracePeriodSeconds": function.timeout_s + _LEAVING_S + 5,
        **pod.pod(placement, container),
    }
    # An autoscaler owns the number of instances; a number here would undo its work at each `kubectl apply`.
    fixed = {"replicas": least_instances(scaling, placement)} if scaling.autoscaler == "none" else {}
    start_s = 0.0 if function.measured is None else function.measured.answer_s
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": where,
        "spec": {
            **fixed,
            "selector": {"matchLabels": _selector(function)},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "progressDeadlineSeconds": max(600, math.ceil(_STARTS * start_s)),
            "template": {"metadata": template, "spec": spec},
        },
    }


def _service(function: Function, where: dict[str, Any]) -> dict[str, Any]:
    ports = [{"name": "http", "port": 80, "targetPort": pod.PORT, "protocol": "TCP"}]
    spec = {"type": "ClusterIP", "selector": _selector(function), "ports": ports}
    return {"apiVersion": "v1", "kind": "Service", "metadata": where, "spec": spec}


def _target(function: Function) -> dict[str, str]:
    return {"apiVersion": "apps/v1", "kind": "Deployment", "name": function.name}


def _most_instances(scaling: Scaling, placement: Placement) -> int:
    return placement.max_scale or max(_MOST_INSTANCES, least_instances(scaling, placement))


def _cooldown_s(function: Function) -> int:
    if function.measured is None:
        return _DEFAULT_COOLDOWN_S
    return min(max(math.ceil(_STARTS * function.measured.answer_s), _LEAST_COOLDOWN_S), _MOST_COOLDOWN_S)


def _hpa(function: Function, placement: Placement, scaling: Scaling, where: dict[str, Any]) -> dict[str, Any]:
    target = {"type": "Utilization", "averageUtilization": _CPU_PERCENT}
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": where,
        "spec": {
            "scaleTargetRef": _target(function),
            "minReplicas": least_instances(scaling, placement),
            "maxReplicas": _most_instances(scaling, placement),
            "metrics": [{"type": "Resource", "resource": {"name": "cpu", "target": target}}],
            "behavior": {
                "scaleUp": {"stabilizationWindowSeconds": 0},
                "scaleDown": {"stabilizationWindowSeconds": _cooldown_s(function)},
            },
        },
    }


def _scaled_object(function: Function, placement: Placement, scaling: Scaling, where: dict[str, Any]) -> dict[str, Any]:
    """Scale by the requests in flight or held. If no pod ran, none would be reported, so one always runs."""
    pods = f'namespace="{placement.namespace}",pod=~"{function.name}-.*"'
    query = f"sum(medusa_requests_in_flight{{{pods}}}) + sum(medusa_requests_held{{{pods}}})"
    trigger = {
        "type": "prometheus",
        "metadata": {
            "serverAddress": scaling.prometheus,
            "query": query,
            "threshold": f"{max(1.0, _UTILIZATION * function.concurrency):g}",
        },
    }
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": where,
        "spec": {
            "scaleTargetRef": _target(function),
            "minReplicaCount": least_instances(scaling, placement),
            "maxReplicaCount": _most_instances(scaling, placement),
            "cooldownPeriod": _cooldown_s(function),
            "triggers": [trigger],
        },
    }


def _http_scaled_object(
    function: Function, placement: Placement, scaling: Scaling, where: dict[str, Any]
) -> dict[str, Any]:
    return {
        "apiVersion": "http.keda.sh/v1alpha1",
        "kind": "HTTPScaledObject",
        "metadata": where,
        "spec": {
            "hosts": list(scaling.hosts),
            "scaleTargetRef": {**_target(function), "service": function.name, "port": 80},
            "replicas": {
                "min": least_instances(scaling, placement),
                "max": _most_instances(scaling, placement),
            },
            "scaledownPeriod": _cooldown_s(function),
            "scalingMetric": {"concurrency": {"targetValue": max(1, round(_UTILIZATION * function.concurrency))}},
        },
    }
