"""A function as a Knative Service (serving.knative.dev/v1)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from medusa_runtime.errors import ConfigError

from ..function import Function
from . import network_policy, pod, scaling
from .pod import Placement

MOST_TIMEOUT_S = 600  # unless the cluster raises max-revision-timeout-seconds
LEAST_TIMEOUT_S = 60  # also the pod's termination grace; queue-proxy alone may take 30 s of it
_QUIET_S = 30  # queue-proxy delays SIGTERM until no request has come for this long
RESERVED = {"PORT", "K_SERVICE", "K_CONFIGURATION", "K_REVISION"}


def service(function: Function, placement: Placement) -> dict[str, Any]:
    """Return the Service. Raises ConfigError for a variable that Knative sets itself."""
    reserved = RESERVED & set(function.env)
    if reserved:
        raise ConfigError(f"--env {', '.join(sorted(reserved))}: Knative sets it itself")
    scale = scaling.scale(
        function.measured,
        concurrency=function.concurrency,
        min_scale=placement.min_scale,
        max_scale=placement.max_scale,
    )
    template: dict[str, Any] = {"annotations": {**scale, **placement.annotations}}
    if placement.labels:
        template["labels"] = dict(placement.labels)
    return {
        "apiVersion": "serving.knative.dev/v1",
        "kind": "Service",
        "metadata": _metadata(function, placement),
        "spec": {"template": {"metadata": template, "spec": _pod(function, placement)}},
    }


def network_policy_of(service: dict[str, Any]) -> dict[str, Any]:
    """Return the policy for the Service's pods, which Knative labels with its name."""
    return network_policy.of_knative(service["metadata"], {"serving.knative.dev/service": service["metadata"]["name"]})


def _metadata(function: Function, placement: Placement) -> dict[str, Any]:
    """Return metadata without autoscaling annotations, which Knative only takes on the template."""
    kept = {key: value for key, value in placement.annotations.items() if not key.startswith(scaling.PREFIX)}
    return pod.metadata(function, replace(placement, annotations=kept))


def _pod(function: Function, placement: Placement) -> dict[str, Any]:
    container = pod.container(
        function,
        placement,
        drain_s=function.timeout_s - _QUIET_S - 5,
        # No startup probe: it would delay the first readiness probe by up to a second. Readiness has no period,
        # so that queue-proxy asks every 50 ms; a start of any length only fails it, never kills the container.
        readiness={"httpGet": {"path": "/readyz", "port": pod.PORT}, "successThreshold": 1},
    )
    return {
        "containerConcurrency": function.concurrency,
        "timeoutSeconds": function.timeout_s,
        # An answer that is not streamed starts when it is complete. No idle timeout: it includes time in the queue.
        "responseStartTimeoutSeconds": function.timeout_s,
    } | pod.pod(placement, container)
