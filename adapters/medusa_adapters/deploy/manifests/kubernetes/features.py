"""Which feature flags a Knative Service needs: Knative's admission refuses a gated field whose flag is off.

They are read from the rendered manifest, so that nothing can be forgotten.
Source: the field descriptions of the Service CRD, and Knative's ``config-features``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_POD = {
    "nodeSelector": "kubernetes.podspec-nodeselector",
    "tolerations": "kubernetes.podspec-tolerations",
    "runtimeClassName": "kubernetes.podspec-runtimeclassname",
}


def required(service: Mapping[str, Any]) -> dict[str, str]:
    """Return the flags to set to ``enabled`` in ConfigMap ``config-features``, each with the field that needs it."""
    template = service["spec"]["template"]
    found = {flag: field for field, flag in _POD.items() if field in template["spec"]}
    if any("hostPath" in volume for volume in template["spec"]["volumes"]):
        found["kubernetes.podspec-volumes-hostpath"] = "volumes.hostPath"
    if template["metadata"]["annotations"].get("autoscaling.knative.dev/initial-scale") == "0":
        found["allow-zero-initial-scale (in config-autoscaler)"] = "initial-scale"
    return found
