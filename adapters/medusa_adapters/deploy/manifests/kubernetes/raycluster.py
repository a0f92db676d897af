"""A cluster of medusa's on Kubernetes: a KubeRay RayCluster, its gateways, and what they need.

KubeRay makes the pods, replaces those that die, and adds and removes them for Ray's autoscaler. In a pod runs
`medusa cluster start`, as on every other machine, and starts Ray itself (``ray.io/overwrite-container-cmd``): each node
has a label of its own in Ray, which KubeRay's `ray start` of a whole group cannot give, and one process ends agent,
instances and Ray in order.

The node's folder is a hostPath, so that functions on the same machine find the agent of this node where the DaemonSet's
would be. A machine has one such pod at most.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import network_policy, node_agent
from .pod import Placement, resources
from .pod_spec import CONFINED_ROOT, allowed_nodes
from .secret import environment, sources

DATA_PORT = 8114
GATEWAY_PORT = 8080
TOKEN_KEY = "auth_token"  # KubeRay's own name of the entry
RAY_VERSION = "2.60.0"
GROUP = "nodes"
_RAY_PORT = 6379
_TOKEN_FOLDER = "/var/run/secrets/medusa"
TOKEN_FILE = f"{_TOKEN_FOLDER}/token"
_PART_OF = {"app.kubernetes.io/part-of": "medusa-cluster"}
_DRAIN_S = 30
_SHARED_MEMORY = "256Mi"  # of Ray's object store, which carries control messages alone


@dataclass(frozen=True)
class RayCluster:
    """The values given to `medusa deploy cluster`. ``token`` is None if the Secret exists already."""

    name: str
    image: str
    placement: Placement
    nodes: int = 3
    most_nodes: int = 3
    gateways: int = 2
    token_secret: str = ""
    token: str | None = None
    head_storage: str | None = None
    client_token_secret: str | None = None
    tls: bool = False  # with certificates that nodes and gateways make from the token
    flags: Sequence[str] = ()  # of `medusa cluster start`
    gateway_flags: Sequence[str] = ()  # of `medusa cluster gateway`
    env: Mapping[str, str] = field(default_factory=dict)  # of nodes
    gateway_env: Mapping[str, str] = field(default_factory=dict)

    @property
    def head(self) -> str:
        """The name of the Service of the head's node server."""
        return f"{self.name}-head"

    @property
    def gateway(self) -> str:
        return f"{self.name}-gateway"

    @property
    def autoscales(self) -> bool:
        return self.most_nodes > self.nodes


def manifests(cluster: RayCluster) -> list[dict[str, Any]]:
    """Return Secret, volume claim, RayCluster, Services, gateways and NetworkPolicies, as far as they are needed."""
    found = []
    if cluster.token is not None:
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": _metadata(cluster, cluster.token_secret)}
        found.append(secret | {"type": "Opaque", "stringData": {TOKEN_KEY: cluster.token}})
    if cluster.head_storage is not None:
        claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": cluster.head_storage}}}
        metadata = _metadata(cluster, cluster.head)
        found.append({"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": claim})
    return [*found, _ray_cluster(cluster), *_services(cluster), _gateways(cluster), *_network_policies(cluster)]


def _ray_cluster(cluster: RayCluster) -> dict[str, Any]:
    # What the autoscaler reckons with. The command is ours, so `ray start` itself never sees it.
    start = {"num-cpus": "0", "resources": json.dumps(json.dumps({"medusa_node": 1}))}
    worker = {
        "groupName": GROUP,
        "replicas": cluster.nodes - 1,
        "minReplicas": cluster.nodes - 1,
        "maxReplicas": cluster.most_nodes - 1,
        "rayStartParams": start,
        "template": _template(cluster, head=False),
    }
    spec: dict[str, Any] = {
        "rayVersion": RAY_VERSION,
        "authOptions": {"mode": "token", "secretName": cluster.token_secret},
        "headGroupSpec": {"rayStartParams": start, "template": _template(cluster, head=True)},
        "workerGroupSpecs": [worker],
    }
    if cluster.autoscales:
        spec |= {"enableInTreeAutoscaling": True, "autoscalerOptions": {"version": "v1"}}
    metadata = _metadata(cluster, cluster.name)
    metadata["annotations"] = {"ray.io/overwrite-container-cmd": "true"} | metadata.get("annotations", {})
    return {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": metadata, "spec": spec}


def _template(cluster: RayCluster, *, head: bool) -> dict[str, Any]:
    placement = cluster.placement
    role = ["--head"] if head else [f"--address={cluster.head}:{DATA_PORT}"]
    if head and cluster.autoscales:
        role += ["--external-autoscaler", f"--least-nodes={cluster.nodes}"]
    command = ["medusa", "cluster", "start", *role, "--name=$(POD_NAME)", "--host=$(POD_IP)"]
    command += [f"--dir={node_agent.FOLDER}", f"--token-file={TOKEN_FILE}", *_tls(cluster), *cluster.flags]
    # The kubelet has no certificate. A node server that hangs is ended by its parent in any case.
    asked = {"tcpSocket": {"port": DATA_PORT}} if cluster.tls else {"httpGet": {"path": "/healthz", "port": DATA_PORT}}
    health = {**asked, "timeoutSeconds": 5}
    container: dict[str, Any] = {
        "name": "node",
        "image": cluster.image,
        "command": command,
        "ports": [
            {"name": "gcs-server", "containerPort": _RAY_PORT},
            {"name": "medusa", "containerPort": DATA_PORT},
        ],
        "env": [
            _field("POD_NAME", "metadata.name"),
            _field("POD_IP", "status.podIP"),
            *environment(cluster.env, placement.secrets),
        ],
        "resources": resources(placement),
        # Without these KubeRay adds its own, which ask Ray's dashboard.
        "readinessProbe": {**health, "periodSeconds": 5},
        "livenessProbe": {**health, "periodSeconds": 20, "initialDelaySeconds": 20, "failureThreshold": 6},
        "securityContext": CONFINED_ROOT,
        "volumeMounts": [
            node_agent.mount(read_only=False),
            *({"name": name, "mountPath": f"{node_agent.FOLDER}/{name}"} for name in ("ray", "logs", "gcs")),
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shared-mem", "mountPath": "/dev/shm"},
            {"name": "token", "mountPath": _TOKEN_FOLDER, "readOnly": True},
        ],
    }
    if from_secrets := sources(placement.secrets):
        container["envFrom"] = from_secrets
    state: dict[str, Any] = {"name": "gcs", "emptyDir": {}}
    if head and cluster.head_storage is not None:
        state = {"name": "gcs", "persistentVolumeClaim": {"claimName": cluster.head}}
    pod = _pod(cluster, container, account=head and cluster.autoscales)
    pod["affinity"] = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [_ALONE]}}
    pod["terminationGracePeriodSeconds"] = _DRAIN_S + 30
    pod["volumes"] = [
        node_agent.volume("DirectoryOrCreate"),
        {"name": "ray", "emptyDir": {}},
        {"name": "logs", "emptyDir": {}},
        state,
        {"name": "tmp", "emptyDir": {}},
        {"name": "shared-mem", "emptyDir": {"medium": "Memory", "sizeLimit": _SHARED_MEMORY}},
        _token_volume(cluster.token_secret, "token"),
    ]
    return {"metadata": {"labels": _labels(cluster, "node")}, "spec": pod}


_ALONE = {
    "topologyKey": "kubernetes.io/hostname",
    "namespaceSelector": {},  # of all namespaces
    "labelSelector": {"matchLabels": {**_PART_OF, "app.kubernetes.io/component": "node"}},
}


def _services(cluster: RayCluster) -> list[dict[str, Any]]:
    head = {"ray.io/cluster": cluster.name, "ray.io/node-type": "head"}
    # Nodes that join connect to the head before it is ready.
    spec = {"selector": head, "publishNotReadyAddresses": True, "ports": [_port("medusa", DATA_PORT, DATA_PORT)]}
    entrance = {"selector": _labels(cluster, "gateway"), "ports": [_port("http", 80, GATEWAY_PORT)]}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(cluster, cluster.head), "spec": spec},
        {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(cluster, cluster.gateway), "spec": entrance},
    ]


def _gateways(cluster: RayCluster) -> dict[str, Any]:
    command = ["medusa", "cluster", "gateway", f"--address={cluster.head}:{DATA_PORT}", f"--token-file={TOKEN_FILE}"]
    command += [*_tls(cluster), *cluster.gateway_flags]
    mounts = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "token", "mountPath": _TOKEN_FOLDER, "readOnly": True}]
    volumes = [{"name": "tmp", "emptyDir": {}}, _token_volume(cluster.token_secret, "token")]
    if cluster.client_token_secret is not None:
        command.append(f"--client-token-file={_TOKEN_FOLDER}-clients/token")
        mounts.append({"name": "client-token", "mountPath": f"{_TOKEN_FOLDER}-clients", "readOnly": True})
        volumes.append(_token_volume(cluster.client_token_secret, "client-token"))
    container = {
        "name": "gateway",
        "image": cluster.image,
        "command": [*command, f"--port={GATEWAY_PORT}", f"--drain-s={_DRAIN_S}", "--name=$(POD_NAME)"],
        "ports": [{"name": "http", "containerPort": GATEWAY_PORT}],
        "env": [_field("POD_NAME", "metadata.name"), *environment(cluster.gateway_env, ())],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": GATEWAY_PORT}, "periodSeconds": 2},
        "livenessProbe": {"httpGet": {"path": "/livez", "port": GATEWAY_PORT}, "periodSeconds": 10},
        # A pod that is being removed still gets requests until every machine knows about it.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "5"]}}},
        "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
        "securityContext": CONFINED_ROOT,
        "volumeMounts": mounts,
    }
    labels = _labels(cluster, "gateway")
    pod = _pod(cluster, container, account=False)
    pod |= {"terminationGracePeriodSeconds": _DRAIN_S + 15, "volumes": volumes}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _metadata(cluster, cluster.gateway),
        "spec": {
            "replicas": cluster.gateways,
            "selector": {"matchLabels": labels},
            "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }


def _network_policies(cluster: RayCluster) -> list[dict[str, Any]]:
    """Return policies that admit nodes and gateways to nodes, and pods of the namespace to gateways."""
    nodes = {"ray.io/cluster": cluster.name}
    gateway = _labels(cluster, "gateway")
    to_nodes: list[dict[str, Any]] = [
        {"from": [{"podSelector": {"matchLabels": nodes}}]},
        {"from": [{"podSelector": {"matchLabels": gateway}}], "ports": [{"protocol": "TCP", "port": DATA_PORT}]},
    ]
    to_gateways = [{"from": [{"podSelector": {}}], "ports": [{"protocol": "TCP", "port": GATEWAY_PORT}]}]
    return [
        network_policy.policy(_metadata(cluster, f"{cluster.name}-nodes"), nodes, to_nodes),
        network_policy.policy(_metadata(cluster, cluster.gateway), gateway, to_gateways),
    ]


def _pod(cluster: RayCluster, container: Mapping[str, Any], *, account: bool) -> dict[str, Any]:
    """Return the pod around a container. ``account`` says that KubeRay gives it an account, for the autoscaler."""
    placement = cluster.placement
    pod: dict[str, Any] = {"enableServiceLinks": False, "containers": [dict(container)]}
    if not account:
        pod["automountServiceAccountToken"] = False
    if container["name"] != "node":
        return pod | allowed_nodes(placement.pull_secrets)
    pod |= allowed_nodes(placement.pull_secrets, placement.node_selector, placement.tolerations)
    if placement.runtime_class:
        pod["runtimeClassName"] = placement.runtime_class
    return pod


def _tls(cluster: RayCluster) -> list[str]:
    return ["--tls"] if cluster.tls else []


def _metadata(cluster: RayCluster, name: str) -> dict[str, Any]:
    labels = {**cluster.placement.labels, **_PART_OF, "app.kubernetes.io/managed-by": "medusa"}
    found: dict[str, Any] = {"name": name, "namespace": cluster.placement.namespace, "labels": labels}
    annotations = dict(cluster.placement.annotations)
    return found | ({"annotations": annotations} if annotations else {})


def _labels(cluster: RayCluster, component: str) -> dict[str, str]:
    return {"app.kubernetes.io/name": cluster.name, **_PART_OF, "app.kubernetes.io/component": component}


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _port(name: str, port: int, target: int) -> dict[str, Any]:
    return {"name": name, "port": port, "targetPort": target}


def _token_volume(secret: str, name: str) -> dict[str, Any]:
    """Return a volume with the token as a file that only its owner, root, can read."""
    items = [{"key": TOKEN_KEY, "path": "token"}]
    return {"name": name, "secret": {"secretName": secret, "defaultMode": 0o400, "items": items}}
