"""Parts of a pod's specification that all of our pods have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

CONFINED = {
    "readOnlyRootFilesystem": True,
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
# For files that the kubelet makes for root: without capabilities root is their owner and nothing more.
CONFINED_ROOT = {"runAsUser": 0, **CONFINED}


def allowed_nodes(
    pull_secrets: Sequence[str],
    node_selector: Mapping[str, str] | None = None,
    tolerations: Sequence[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """Return which nodes may have the pod, and with which secrets they get its image."""
    found: dict[str, Any] = {
        "imagePullSecrets": [{"name": name} for name in pull_secrets],
        "nodeSelector": dict(node_selector or {}),
        "tolerations": [dict(toleration) for toleration in tolerations],
    }
    return {field: value for field, value in found.items() if value}
