"""The node agent on Kubernetes: a DaemonSet that owns regions and warm processes, reached over a Unix socket.

It needs no privileges, no host network and no Kubernetes API. The socket lies in a hostPath folder; functions mount
that folder read-only (Knative forces it) and are passed sealed descriptors through it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import network_policy, secret
from .pod_spec import CONFINED_ROOT, allowed_nodes
from .secret import Secret

FOLDER = "/run/medusa"
SOCKET = f"{FOLDER}/node.sock"
NAMESPACE = "medusa-system"
NAME = "medusa-node"
_LABELS = {"app.kubernetes.io/name": NAME, "app.kubernetes.io/managed-by": "medusa"}
# hostPath violates the baseline Pod Security standard.
PRIVILEGED = {"pod-security.kubernetes.io/enforce": "privileged"}


def label_command(namespace: str) -> str:
    """Return the command that allows pods of a namespace to mount the agent's folder."""
    ((label, level),) = PRIVILEGED.items()
    return f"kubectl label namespace {namespace} {label}={level}"


def volume(kind: str) -> dict[str, Any]:
    return {"name": "medusa-node", "hostPath": {"path": FOLDER, "type": kind}}


def mount(*, read_only: bool) -> dict[str, Any]:
    return {"name": "medusa-node", "mountPath": FOLDER, "readOnly": read_only}


def variables(daemon: Mapping[str, Any]) -> dict[str, str]:
    """Return the plain variables of an agent's DaemonSet."""
    (container,) = daemon["spec"]["template"]["spec"]["containers"]
    return {entry["name"]: entry["value"] for entry in container.get("env", ()) if "value" in entry}


def set_variable(daemon: Mapping[str, Any], name: str, value: str) -> None:
    """Give a DaemonSet's agent a variable, in place of the one it has."""
    (container,) = daemon["spec"]["template"]["spec"]["containers"]
    container["env"] = [entry for entry in container["env"] if entry["name"] != name] + [{"name": name, "value": value}]


def manifests(
    image: str,
    *,
    memory: str,
    cpu: str = "100m",
    environment: Mapping[str, str | None] | None = None,
    secrets: Sequence[Secret] = (),
    metrics_port: int | None = None,
    pull_secrets: Sequence[str] = (),
    node_selector: Mapping[str, str] | None = None,
    tolerations: Sequence[Mapping[str, str]] = (),
) -> list[dict[str, Any]]:
    """Return Namespace, ServiceAccount, Role, RoleBinding, NetworkPolicy and DaemonSet.

    ``memory`` and ``cpu`` are for regions and engine processes: those that were taken run on in the agent's container.
    ``environment`` has `medusa node`'s variables, those without a value are left out; ``secrets`` (in the agent's
    namespace) are what it fetches with. ``metrics_port`` is open to all pods; without it, nobody may connect.
    """
    given = {name: value for name, value in (environment or {}).items() if value}
    ingress: list[dict[str, Any]] = []
    scraped: dict[str, Any] = {}
    exposed: dict[str, Any] = {}
    if metrics_port is not None:
        given["MEDUSA_NODE_METRICS_PORT"] = str(metrics_port)
        ingress = [{"ports": [{"protocol": "TCP", "port": metrics_port}]}]
        scraped = {"annotations": {"prometheus.io/scrape": "true", "prometheus.io/port": str(metrics_port)}}
        exposed = {"ports": [{"name": "metrics", "containerPort": metrics_port}]}
    where = {"name": NAME, "namespace": NAMESPACE, "labels": _LABELS}
    rbac = "rbac.authorization.k8s.io"
    return [
        {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": NAMESPACE, "labels": {**_LABELS, **PRIVILEGED}},
        },
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": where, "automountServiceAccountToken": False},
        # The agent does not use the Kubernetes API, so it has an account of its own without any rights.
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": where, "rules": []},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": where,
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": NAME},
            "subjects": [{"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}],
        },
        # The agent's one socket is in a folder. What it fetches from may be anywhere, so going out is not restricted.
        network_policy.policy(where, {"app.kubernetes.io/name": NAME}, ingress),
        {
            "apiVersion": "apps/v1",
            "kind": "DaemonSet",
            "metadata": where,
            "spec": {
                "selector": {"matchLabels": {"app.kubernetes.io/name": NAME}},
                "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}},
                "template": {
                    "metadata": {"labels": _LABELS, **scraped},
                    "spec": _pod(
                        _container(image, memory, cpu, {"MEDUSA_NODE_SOCKET": SOCKET} | given, secrets) | exposed,
                        pull_secrets,
                        node_selector,
                        tolerations,
                    ),
                },
            },
        },
    ]


def _container(
    image: str, memory: str, cpu: str, variables: Mapping[str, str], secrets: Sequence[Secret]
) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": "node",
        "image": image,
        "args": ["node"],
        "env": secret.environment(variables, secrets),
        "resources": {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": memory}},
        "readinessProbe": {
            "exec": {"command": ["medusa", "node", "status"]},
            "periodSeconds": 30,
            "timeoutSeconds": 10,
        },
        # The command gives up before the kubelet does. An agent that does not answer for a minute is replaced; the
        # functions keep what they have.
        "livenessProbe": {
            "exec": {"command": ["medusa", "node", "ping"]},
            "initialDelaySeconds": 10,
            "periodSeconds": 20,
            "timeoutSeconds": 10,
            "failureThreshold": 3,
        },
        "securityContext": CONFINED_ROOT,
        "volumeMounts": [mount(read_only=False), {"name": "tmp", "mountPath": "/tmp"}],
    }
    if from_secrets := secret.sources(secrets):
        container["envFrom"] = from_secrets
    return container


def _pod(
    container: dict[str, Any],
    pull_secrets: Sequence[str],
    node_selector: Mapping[str, str] | None,
    tolerations: Sequence[Mapping[str, str]],
) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "serviceAccountName": NAME,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 30,
        "priorityClassName": "system-node-critical",
        "containers": [container],
        "volumes": [volume("DirectoryOrCreate"), {"name": "tmp", "emptyDir": {}}],
    }
    return pod | allowed_nodes(pull_secrets, node_selector, tolerations)
