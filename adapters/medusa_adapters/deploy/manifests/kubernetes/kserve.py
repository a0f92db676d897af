"""A function as a KServe ServingRuntime, and the InferenceService that uses it.

The runtime has what belongs to the image, the service what belongs to the model and to its load. The model is given as
MEDUSA_MODEL and not as ``storageUri``: KServe's storage initializer would fetch all of it before the container starts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from medusa_runtime.errors import ConfigError

from ..function import Function
from . import pod
from .pod import Placement

MODES = {"knative": "Serverless", "standard": "RawDeployment"}
FORMAT = "safetensors"
_QUIET_S = 30  # as in knative.py
_OF_MODEL = ("env", "envFrom", "resources")
_OF_RUNTIME = ("volumes", "imagePullSecrets")


def manifests(function: Function, placement: Placement, *, mode: str) -> list[dict[str, Any]]:
    """Return the ServingRuntime and the InferenceService. ``mode`` is a key of MODES."""
    knative = mode == "knative"
    if not knative and placement.min_scale == 0:
        raise ConfigError(
            "--mode standard needs --min-scale=1 or more: only --mode knative goes to zero and comes back"
        )
    container = pod.container(
        replace(function, env={"MEDUSA_SERVED_MODEL_NAME": function.name, **function.env}),  # the one that clients use
        placement,
        name="kserve-container",
        drain_s=function.timeout_s - (_QUIET_S + 5 if knative else 5),
        # Without a period, queue-proxy probes every 50 ms; a kubelet probes at most once a second.
        readiness={"httpGet": {"path": "/readyz", "port": pod.PORT}, "successThreshold": 1}
        | ({} if knative else {"periodSeconds": 1}),
    )
    spec = pod.pod(placement, container)
    where = pod.metadata(function, placement)
    model = {"modelFormat": {"name": FORMAT}, "runtime": function.name}
    model |= {key: container.pop(key) for key in _OF_MODEL if container.get(key)}
    container.pop("resources", None)
    runtime = {
        "supportedModelFormats": [{"name": FORMAT, "version": "1"}],
        "protocolVersions": ["v1", "v2"],
        "containers": [container],
        **{key: spec.pop(key) for key in _OF_RUNTIME if key in spec},
    }
    del spec["containers"]
    predictor: dict[str, Any] = {
        "minReplicas": placement.min_scale,
        **({"maxReplicas": placement.max_scale} if placement.max_scale else {}),
        "scaleMetric": "concurrency" if knative else "cpu",
        "scaleTarget": function.concurrency if knative else 80,
        "containerConcurrency": function.concurrency,
        "timeout": function.timeout_s,
        **spec,
        "model": model,
    }
    annotations = {"serving.kserve.io/deploymentMode": MODES[mode], **placement.annotations}
    group = "serving.kserve.io"
    return [
        {"apiVersion": f"{group}/v1alpha1", "kind": "ServingRuntime", "metadata": where, "spec": runtime},
        {
            "apiVersion": f"{group}/v1beta1",
            "kind": "InferenceService",
            "metadata": {**where, "annotations": annotations},
            "spec": {"predictor": predictor},
        },
    ]
