"""Who may connect to pods (networking.k8s.io/v1). A cluster whose network plugin has no policies ignores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SYSTEM = "knative-serving"
GATEWAYS = ("kourier-system", "istio-system", "contour-external", "contour-internal")
_NAMESPACE = "kubernetes.io/metadata.name"  # a label that every namespace has


def of_knative(metadata: Mapping[str, Any], pods: Mapping[str, str]) -> dict[str, Any]:
    """Return a policy that admits Knative (activator, autoscaler), its gateways, and the function's own namespace."""
    systems = {"key": _NAMESPACE, "operator": "In", "values": [SYSTEM, *GATEWAYS]}
    peers = [{"namespaceSelector": {"matchExpressions": [systems]}}, {"podSelector": {}}]
    return policy(metadata, pods, [{"from": peers}])


def of_namespace(metadata: Mapping[str, Any], pods: Mapping[str, str]) -> dict[str, Any]:
    """Return a policy that admits pods of the function's own namespace."""
    return policy(metadata, pods, [{"from": [{"podSelector": {}}]}])


def policy(metadata: Mapping[str, Any], pods: Mapping[str, str], ingress: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a policy by which only what the ``ingress`` rules name, and the kubelet, may connect to these pods."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": dict(metadata),
        "spec": {"podSelector": {"matchLabels": dict(pods)}, "policyTypes": ["Ingress"], "ingress": ingress},
    }


__all__ = ["of_knative", "of_namespace", "policy"]
