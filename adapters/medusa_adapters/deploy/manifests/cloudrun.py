"""A function as a Cloud Run service: Knative's form, without the fields that Cloud Run refuses.

Source: cloud.google.com/run/docs, "Container runtime contract" and the YAML reference of services (v1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_runtime.errors import ConfigError

from . import values
from .function import Function
from .kubernetes import knative, pod, secret
from .kubernetes.secret import Secret

MOST_TIMEOUT_S = 3600
CPUS = ("1", "2", "4", "6", "8")
_LABEL = re.compile("[a-z][-_a-z0-9]{0,62}")
_DRAIN_S = 8  # SIGKILL follows SIGTERM after 10 s
_STARTUP_S = 240  # the longest that Cloud Run waits for a startup probe


@dataclass(frozen=True)
class CloudRun:
    """What the service has beyond the function itself. ``accelerator``: a GPU's type, e.g. nvidia-l4."""

    region: str | None = None
    cpu: str = "1"
    memory: str = "2Gi"
    accelerator: str | None = None
    min_scale: int = 0
    max_scale: int = 0  # 0: as the project's limit has it
    service_account: str | None = None
    secrets: Sequence[Secret] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)


def check(where: CloudRun) -> None:
    """Raise ConfigError for values that Cloud Run refuses. It names the flag."""
    if where.cpu not in CPUS:
        raise ConfigError(f"--cpu={where.cpu} cannot be used: expected one of {', '.join(CPUS)}")
    for key, value in where.labels.items():
        if not _LABEL.fullmatch(key) or value != value.lower() or "." in value:
            raise ConfigError(
                f"--label {key}={value} cannot be used: expected lower-case letters, digits, '-' and '_' on Cloud Run"
            )
    gib = values.amount(values.memory(where.memory, "--memory")) / 2**30
    values.check_range(gib, 0.5, 32, "--memory", "GiB")
    if where.accelerator and (int(where.cpu) < 4 or gib < 16):
        raise ConfigError(
            f"--gpu-type={where.accelerator}: Cloud Run gives a GPU only with --cpu 4 and --memory 16Gi or more, found "
            f"{where.cpu} and {where.memory}"
        )
    for whole in (found for found in where.secrets if found.key is None):
        raise ConfigError(
            f"--secret={whole.name}: Cloud Run's secrets are one value each; expected VARIABLE=SECRET/VERSION, "
            f"e.g. HF_TOKEN={whole.name}/latest"
        )


def service(function: Function, where: CloudRun) -> dict[str, Any]:
    """Return the service, with checked values."""
    check(where)
    if reserved := knative.RESERVED & set(function.env):
        raise ConfigError(f"--env {', '.join(sorted(reserved))}: Cloud Run sets it itself")
    labels = {**where.labels, "managed-by": "medusa"}
    if where.region:
        labels["cloud.googleapis.com/location"] = where.region
    metadata: dict[str, Any] = {"name": function.name, "labels": labels}
    return {
        "apiVersion": "serving.knative.dev/v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "template": {
                "metadata": ({"labels": dict(where.labels)} if where.labels else {})
                | {"annotations": _annotations(where)},
                "spec": _spec(function, where),
            }
        },
    }


def _annotations(where: CloudRun) -> dict[str, str]:
    found = {
        "autoscaling.knative.dev/minScale": str(where.min_scale),
        "run.googleapis.com/execution-environment": "gen2",  # a whole Linux kernel
        "run.googleapis.com/startup-cpu-boost": "true",
    }
    if where.max_scale:
        found["autoscaling.knative.dev/maxScale"] = str(where.max_scale)
    if where.accelerator:
        found["run.googleapis.com/cpu-throttling"] = "false"  # Cloud Run only gives a GPU with this setting
        found["run.googleapis.com/gpu-zonal-redundancy-disabled"] = "true"
    return {**found, **where.annotations}


def _spec(function: Function, where: CloudRun) -> dict[str, Any]:
    limits = {"cpu": where.cpu, "memory": where.memory}
    env = {"MEDUSA_DRAIN": str(_DRAIN_S)} | dict(function.env)
    container: dict[str, Any] = {
        "image": function.image,
        "ports": [{"name": "http1", "containerPort": pod.PORT}],
        "env": secret.environment(env, where.secrets),
        "resources": {"limits": limits | ({"nvidia.com/gpu": "1"} if where.accelerator else {})},
        "livenessProbe": {**pod.LIVENESS, "httpGet": {"path": "/livez"}},
    }
    if where.min_scale:
        # An instance that no request has started gets CPU only until its startup probe succeeds. Without this probe,
        # a request is passed on as soon as the port is open, and held here, which is faster.
        container["startupProbe"] = {
            "httpGet": {"path": "/readyz"},
            "periodSeconds": 1,
            "timeoutSeconds": 1,
            "failureThreshold": _STARTUP_S,
        }
    found: dict[str, Any] = {
        "containerConcurrency": function.concurrency,
        "timeoutSeconds": function.timeout_s,
        "containers": [container],
    }
    if where.service_account:
        found["serviceAccountName"] = where.service_account
    if where.accelerator:
        found["nodeSelector"] = {"run.googleapis.com/accelerator": where.accelerator}
    return found
