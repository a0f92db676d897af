"""Which feature flags a Knative Service needs, and what the CRD does not check behind them.

Knative's admission refuses a gated field whose flag is off, and its CRD lets any content of one through
(x-kubernetes-preserve-unknown-fields). Both are read from the rendered manifest, so that nothing can be forgotten.
Source: the field descriptions of the Service CRD, and Knative's ``config-features``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from medusa_runtime.errors import ConfigError

_POD = {
    "nodeSelector": "kubernetes.podspec-nodeselector",
    "tolerations": "kubernetes.podspec-tolerations",
    "affinity": "kubernetes.podspec-affinity",
    "runtimeClassName": "kubernetes.podspec-runtimeclassname",
    "securityContext": "kubernetes.podspec-securitycontext",
    "initContainers": "kubernetes.podspec-init-containers",
}
_VOLUME = {"hostPath": "kubernetes.podspec-volumes-hostpath"}
_ALWAYS_ON = {"emptyDir", "secret", "configMap", "projected"}
_TOLERATION = {"key": str, "operator": str, "value": str, "effect": str}
_EFFECTS = {"NoSchedule", "PreferNoSchedule", "NoExecute"}
_HOST_PATH_TYPES = {"", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"}


def required(service: Mapping[str, Any]) -> dict[str, str]:
    """Flag → the field that needs it. They go into ConfigMap ``config-features`` as ``enabled``."""
    pod = service["spec"]["template"]["spec"]
    found = {flag: field for field, flag in _POD.items() if field in pod}
    for volume in pod.get("volumes", ()):
        found |= {flag: f"volumes.{kind}" for kind, flag in _VOLUME.items() if kind in volume}
    if (
        service["spec"]["template"]["metadata"].get("annotations", {}).get("autoscaling.knative.dev/initial-scale")
        == "0"
    ):
        found["allow-zero-initial-scale (in config-autoscaler)"] = "initial-scale"
    return found


def check(service: Mapping[str, Any]) -> None:
    """ConfigError for what the cluster would refuse late or silently drop in a gated field."""
    pod = service["spec"]["template"]["spec"]
    unknown = (set(pod) & {"hostIPC", "hostNetwork", "hostPID", "dnsConfig", "schedulerName"}) | (
        {"affinity", "securityContext", "initContainers"} & set(pod)
    )
    if unknown:
        raise ConfigError(f"the pod has {', '.join(sorted(unknown))}, which a function never needs")
    for toleration in pod.get("tolerations", ()):
        _check_toleration(toleration)
    kinds = {volume["name"]: _check_volume(volume) for volume in pod.get("volumes", ())}
    for container in pod["containers"]:
        for mount in container.get("volumeMounts", ()):
            if mount["name"] not in kinds:
                raise ConfigError(f"volume mount {mount['name']!r}: the pod has no volume of this name")
            if kinds[mount["name"]] == "hostPath" and not mount.get("readOnly"):
                raise ConfigError(
                    f"volume mount {mount['name']!r}: Knative accepts a hostPath with readOnly: true only"
                )


def _check_volume(volume: Mapping[str, Any]) -> str:
    (kind,) = set(volume) - {"name"}
    content = volume[kind]
    if kind == "hostPath":
        if set(content) - {"path", "type"} or not str(content.get("path", "")).startswith("/"):
            raise ConfigError(f"volume {volume['name']!r}: expected hostPath with an absolute path, found {content}")
        if content.get("type", "") not in _HOST_PATH_TYPES:
            raise ConfigError(f"volume {volume['name']!r}: {content['type']!r} is no type of hostPath")
    elif kind == "emptyDir":
        if set(content) - {"medium", "sizeLimit"}:
            raise ConfigError(
                f"volume {volume['name']!r}: expected emptyDir with medium and sizeLimit, found {content}"
            )
    elif kind not in _ALWAYS_ON:
        raise ConfigError(f"volume {volume['name']!r}: {kind} is not rendered here")
    return kind


def _check_toleration(toleration: Mapping[str, Any]) -> None:
    good = not set(toleration) - set(_TOLERATION) and all(type(value) is str for value in toleration.values())
    operator = toleration.get("operator", "Equal")
    good = good and operator in ("Equal", "Exists") and not (operator == "Exists" and "value" in toleration)
    if not good or toleration.get("effect", "NoSchedule") not in _EFFECTS:
        raise ConfigError(f"toleration {dict(toleration)}: expected key, value or operator Exists, and an effect")
