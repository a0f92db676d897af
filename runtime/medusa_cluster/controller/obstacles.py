"""The reasons for which no node of the cluster can ever run a deployment."""

from __future__ import annotations

from collections.abc import Iterable

from ..deployment import Deployment
from .nodes import KnownNode


def obstacle(deployment: Deployment, nodes: Iterable[KnownNode]) -> str | None:
    """Return why no instance of a deployment can start on any of these nodes, and what is expected; None if one can."""
    if not deployment.device_kind and deployment.device != "cuda" and deployment.gpus == 1:
        return None
    known = [node for node in nodes if node.status and node.lost_at is None]
    kind, name = deployment.device_kind, deployment.name
    fitting = [node for node in known if kind in ("", node.status.get("device_kind", ""))]
    if known and not fitting:
        return f"{name} starts on no node: expected one with --device-kind {kind}, found none"
    gpus = [int(node.status.get("devices", 0)) for node in fitting]
    of_kind = f" with --device-kind {kind}" if kind else ""
    if gpus and deployment.device == "cuda" and not any(gpus):
        return f"{name} starts on no node: expected one{of_kind} with a GPU for --set device=cuda, found none"
    if any(gpus) and deployment.device != "cpu" and max(gpus) < deployment.gpus:  # CPUs are for clusters without GPUs
        needed = f"{deployment.gpus} GPUs for --set tensor-parallel={deployment.gpus}"
        return f"{name} starts on no node: expected one{of_kind} with {needed}, found {max(gpus)} at most"
    return None
