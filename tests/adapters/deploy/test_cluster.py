"""`medusa deploy cluster`: what KubeRay's own schema and Kubernetes' accept."""

from __future__ import annotations

import functools
import json
from functools import partial
from pathlib import Path
from typing import Any

import deploying
import jsonschema
import kubernetes_validate
import pytest
import yaml

rendered = partial(deploying.rendered, "cluster")
refused = partial(deploying.refused, "cluster")
BASE = ("lm", "--image=registry.example/medusa-runtime:cluster")
MORE = [
    *("--nodes=4", "--max-nodes=10", "--gateways=3", "--cpu=4", "--memory=32Gi", "--gpu=1", "--namespace=models"),
    *("--memory-budget=20GB", "--prewarm=torch=2", "--link=10gbit", "--allow=s3://bucket=1000", "--env=HF_HOME=/tmp"),
    *("--secret=aws", "--secret=HF_TOKEN=hub/token", "--head-storage=1Gi", "--pull-secret=registry", "--label=team=a"),
    *("--client-token-secret=clients", "--node-selector=pool=gpu", "--toleration=pool=gpu", "--runtime-class=nvidia"),
    *("--annotation=example.com/note=a b", "--gateway-set=hold-s=120", "--gateway-set=access-log=json"),
    "--gateway-env=OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4318",
    "--log-format=json",
]
CRD = Path(__file__).parent / "schemas" / "kuberay_raycluster_crd.yaml"


@functools.cache
def kuberay() -> jsonschema.Draft202012Validator:
    """Return what checks against KubeRay's own schema of a RayCluster, strictly."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    (version,) = yaml.load(CRD.read_text(), loader)["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(deploying.strict(schema))


def check(document: dict[str, Any]) -> None:
    """Raises for a manifest that the cluster would refuse, or read only in part."""
    if document["kind"] != "RayCluster":
        kubernetes_validate.validate(document, "1.30", strict=True)
        return
    kuberay().validate(document)
    for template in templates(document):  # the CRD leaves out what Kubernetes checks itself
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"} | template["metadata"]}
        kubernetes_validate.validate(pod | {"spec": template["spec"]}, "1.30", strict=True)


def templates(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    spec = cluster["spec"]
    return [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]


def by_kind(documents: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for document in documents:
        check(document)
        found.setdefault(document["kind"], []).append(document)
    return found


@pytest.mark.parametrize("arguments", [[], MORE, ["--token-secret=mine", "--nodes=1"]])
def test_manifests_are_ones_that_kuberay_and_kubernetes_know(arguments: list[str]) -> None:
    found = by_kind(rendered(*BASE, *arguments)[1])
    assert ("Secret" in found) is ("--token-secret=mine" not in arguments)
    assert ("PersistentVolumeClaim" in found) is (arguments is MORE)
    assert {kind: len(found[kind]) for kind in ("RayCluster", "Service", "Deployment", "NetworkPolicy")} == {
        "RayCluster": 1, "Service": 2, "Deployment": 1, "NetworkPolicy": 2,
    }  # fmt: skip


def test_what_selects_pods_finds_them() -> None:
    found = by_kind(rendered(*BASE)[1])
    (deployment,) = found["Deployment"]
    gateway = deployment["spec"]["template"]["metadata"]["labels"]
    # KubeRay's own labels, which it gives to every pod.
    node = {"ray.io/cluster": "lm"}
    head, entrance = found["Service"]
    assert head["spec"]["selector"] == node | {"ray.io/node-type": "head"}
    assert entrance["spec"]["selector"].items() <= gateway.items()
    nodes, gateways = (policy["spec"] for policy in found["NetworkPolicy"])
    assert nodes["podSelector"]["matchLabels"] == node
    assert [rule["from"][0]["podSelector"]["matchLabels"] for rule in nodes["ingress"]] == [node, gateway]
    assert gateways["podSelector"]["matchLabels"] == gateway
    for template in templates(found["RayCluster"][0]):
        (alone,) = template["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert alone["labelSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()


def test_the_node_server_is_what_runs_and_its_agent_is_where_functions_look() -> None:
    (cluster,) = by_kind(rendered(*BASE, *MORE)[1])["RayCluster"]
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    commands = []
    for template in templates(cluster):
        (container,) = template["spec"]["containers"]
        commands.append(container["command"])
        for probe in ("readinessProbe", "livenessProbe"):  # KubeRay adds its own where there is none
            assert container[probe]["httpGet"] == {"path": "/healthz", "port": 8114}
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    head, worker = commands
    assert head[:4] == [*worker[:3], "--head"]
    assert "--address=lm-head:8114" in worker
    assert {"--dir=/run/medusa", "--memory-budget=20GB", "--prewarm=torch=2", "--link=10gbit"} <= set(worker)


def test_with_tls_nodes_and_gateways_make_certificates_and_the_kubelet_needs_none() -> None:
    text, documents = rendered(*BASE, "--tls")
    found = by_kind(documents)
    (cluster,), (gateways,) = found["RayCluster"], found["Deployment"]
    assert "--token-file /var/run/secrets/medusa/token --tls\n" in text
    assert "--tls" in gateways["spec"]["template"]["spec"]["containers"][0]["command"]
    for template in templates(cluster):
        (container,) = template["spec"]["containers"]
        assert "--tls" in container["command"]
        assert all(container[probe]["tcpSocket"] == {"port": 8114} for probe in ("readinessProbe", "livenessProbe"))


def test_gateways_have_the_flags_that_are_set_and_all_log_in_one_form() -> None:
    documents = by_kind(rendered(*BASE, *MORE)[1])
    (gateway,) = documents["Deployment"]
    (container,) = gateway["spec"]["template"]["spec"]["containers"]
    assert {"--hold-s=120", "--access-log=json", "--log-format=json"} <= set(container["command"])
    assert {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4318"} in container["env"]
    for template in templates(documents["RayCluster"][0]):
        assert "--log-format=json" in template["spec"]["containers"][0]["command"]


@pytest.mark.parametrize("platform", ["knative", "kubernetes"])
def test_functions_use_the_agents_of_the_cluster(platform: str) -> None:
    function = ("f", "--image=f:1", "--model=s3://b/m", "--node-agent-of-cluster")
    text, (service, *others) = deploying.rendered(platform, *function)
    assert "DaemonSet" not in [document["kind"] for document in others]
    (container,) = service["spec"]["template"]["spec"]["containers"]
    assert {"name": "MEDUSA_NODE_SOCKET", "value": "/run/medusa/node.sock"} in container["env"]
    assert "medusa deploy cluster … --allow s3://b/m=1000" in text
    assert "found both" in deploying.refused(platform, *function, "--node-agent")
    assert "--node-agent-memory needs" in deploying.refused(platform, *function, "--node-agent-memory=1Gi")


def test_the_autoscaler_runs_only_where_nodes_may_be_added() -> None:
    (fixed,), (growing,) = (
        by_kind(rendered(*BASE, *more)[1])["RayCluster"] for more in (["--nodes=4"], ["--nodes=4", "--max-nodes=9"])
    )
    assert "enableInTreeAutoscaling" not in fixed["spec"]
    assert growing["spec"]["enableInTreeAutoscaling"] is True
    (group,) = growing["spec"]["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (3, 3, 8)
    # As Ray's autoscaler reads it.
    assert json.loads(json.loads(group["rayStartParams"]["resources"])) == {"medusa_node": 1}
    head, _ = templates(growing)
    assert head["spec"]["containers"][0]["command"][4:6] == ["--external-autoscaler", "--least-nodes=4"]
    assert "automountServiceAccountToken" not in head["spec"]


def test_every_pod_has_the_same_token_as_a_file_for_root_alone() -> None:
    text, documents = rendered(*BASE)
    found = by_kind(documents)
    (secret,), (cluster,), (deployment,) = found["Secret"], found["RayCluster"], found["Deployment"]
    assert len(secret["stringData"]["auth_token"]) == 64
    assert cluster["spec"]["authOptions"] == {"mode": "token", "secretName": "lm-token"}
    for template in [*templates(cluster), deployment["spec"]["template"]]:
        volume = next(volume for volume in template["spec"]["volumes"] if volume["name"] == "token")
        assert volume["secret"]["secretName"] == secret["metadata"]["name"] == "lm-token"
        assert volume["secret"]["defaultMode"] == 0o400
    assert text.count(secret["stringData"]["auth_token"]) == 1
    assert rendered(*BASE)[1][0]["stringData"] != secret["stringData"]


def test_apply_keeps_the_token_that_running_nodes_have(tmp_path: Path) -> None:
    script = tmp_path / "kubectl"
    script.write_text(
        f"""#!/bin/sh
case "$1 $2" in
"get namespace") echo '{{"metadata": {{"labels": {{}}}}}}' ;;
"get secret") cat {tmp_path}/secret ;;
*) cat > {tmp_path}/applied; echo applied ;;
esac
"""
    )
    script.chmod(0o755)
    for there in ("", "secret/lm-token\n"):
        (tmp_path / "secret").write_text(there)
        done = deploying.deploy("cluster", *BASE, "--apply", PATH=f"{tmp_path}:/usr/bin:/bin")
        assert (done.returncode, done.stdout) == (0, "applied\n"), done.stderr
        kinds = [document["kind"] for document in yaml.safe_load_all((tmp_path / "applied").read_text())]
        assert ("Secret" in kinds) is not bool(there)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nodes=0"], "--nodes=0"),
        (["--nodes=5", "--max-nodes=4"], "--max-nodes=4"),
        (["--gateways=0"], "--gateways=0"),
        (["--tls", "--max-nodes=4"], "--tls with --max-nodes=4"),
        (["--memory=much"], "--memory='much'"),
        (["--memory-budget=much"], "--memory-budget"),
        (["--prewarm=tgi=1"], "--prewarm"),
        (["--link=fast"], "--link"),
        (["--allow=a b"], "--allow"),
        (["--token-secret=A"], "--token-secret='A'"),
        (["--head-storage=0"], "--head-storage='0'"),
        (["--env=RAY_X=1"], "--env RAY_"),
        (["--runtime-class=N!"], "--runtime-class"),
        (["--secret=a b"], "--secret"),
        (
            ["--gateway-set=hold-s=soon"],
            "argument --hold-s: expected seconds",
        ),
        (["--gateway-set=hold-s"], "--gateway-set='hold-s' cannot be used"),
        (["--gateway-env=1"], "--gateway-env cannot be used"),
        (["--gateway-set=port=1"], "expected NAME=VALUE with one of max-waiting, max-body-mb"),
    ],
)
def test_bad_flags_are_named(arguments: list[str], said: str) -> None:
    assert said in refused(*BASE, *arguments)


def test_a_name_leaves_room_for_what_is_made_of_it() -> None:
    assert "at most 45 characters" in refused("a" * 46, "--image=i")
