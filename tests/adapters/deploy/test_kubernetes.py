"""`medusa deploy kubernetes` and `helm`: what Kubernetes' own schemas accept, and what KEDA reads."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import deploying
import jsonschema
import kubernetes_validate
import pytest
import yaml

rendered = partial(deploying.rendered, "kubernetes")
refused = partial(deploying.refused, "kubernetes")
BASE = ("qwen", "--image=registry.example/qwen:1", "--model=s3://bucket/qwen")
MORE = [
    *("--cpu=2", "--memory=8Gi", "--gpu=1", "--node-selector=pool=gpu", "--toleration=pool=gpu", "--namespace=models"),
    *("--secret=aws", "--secret=HF_TOKEN=hub/token", "--pull-secret=registry", "--label=team=search"),
    *("--annotation=example.com/note=a b", "--service-account=reader", "--runtime-class=nvidia", "--timeout-s=120"),
]


def fields(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """A schema of an object with these fields and no others."""
    found = {"type": "object", "additionalProperties": False, "required": list(required)}
    return found | {"properties": {**required, **optional}}


TEXT, NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}
TARGET = fields({"name": TEXT}, apiVersion=TEXT, kind=TEXT)
# keda.sh/v1alpha1 and http.keda.sh/v1alpha1: the fields of their specifications that are rendered here.
KEDA = {
    "ScaledObject": fields(
        {
            "scaleTargetRef": TARGET,
            "triggers": {
                "type": "array",
                "items": fields(
                    {"type": TEXT, "metadata": fields({"serverAddress": TEXT, "query": TEXT, "threshold": TEXT})}
                ),
            },
        },
        minReplicaCount=NUMBER,
        maxReplicaCount=NUMBER,
        cooldownPeriod=NUMBER,
    ),
    "HTTPScaledObject": fields(
        {"scaleTargetRef": fields({"service": TEXT, "port": NUMBER}, name=TEXT, apiVersion=TEXT, kind=TEXT)},
        hosts={"type": "array", "items": TEXT, "minItems": 1},
        replicas=fields({}, min=NUMBER, max=NUMBER),
        scaledownPeriod=NUMBER,
        scalingMetric=fields({"concurrency": fields({"targetValue": NUMBER})}),
    ),
}


def check(document: dict[str, Any]) -> None:
    """Raises for a manifest that the cluster would refuse, or read only in part."""
    if document["kind"] in KEDA:
        jsonschema.validate(document["spec"], KEDA[document["kind"]])
    else:
        kubernetes_validate.validate(document, "1.30", strict=True)


@pytest.mark.parametrize(
    ("arguments", "kinds"),
    [
        ([], ["Deployment", "Service"]),
        (["--cpu=2"], ["Deployment", "Service", "HorizontalPodAutoscaler"]),
        ([*MORE, "--network-policy"], ["Deployment", "Service", "HorizontalPodAutoscaler", "NetworkPolicy"]),
        (["--autoscaler=keda", "--prometheus=http://prometheus:9090"], ["Deployment", "Service", "ScaledObject"]),
        (["--autoscaler=keda-http", "--host=fn.example.com"], ["Deployment", "Service", "HTTPScaledObject"]),
    ],
)
def test_manifests_are_ones_that_the_cluster_knows(arguments: list[str], kinds: list[str]) -> None:
    _, documents = rendered(*BASE, *arguments)
    assert [document["kind"] for document in documents] == kinds
    for document in documents:
        check(document)
    deployment, service, *rest = documents
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    for selector in (deployment["spec"]["selector"]["matchLabels"], service["spec"]["selector"]):
        assert selector.items() <= labels.items()
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["containerPort"] == 8080
    # An autoscaler's number is not undone by the next `kubectl apply`.
    assert ("replicas" in deployment["spec"]) is (len(rest) == 0)
    for scaler in rest[:1]:
        assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]


def test_a_pod_ends_no_sooner_than_its_requests() -> None:
    _, (deployment, *_) = rendered(*BASE, *MORE)
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    leaving_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > leaving_s + int(env["MEDUSA_DRAIN"])
    assert int(env["MEDUSA_DRAIN"]) == 120
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_keda_asks_for_what_metrics_really_has() -> None:
    text, documents = rendered(*BASE, "--autoscaler=keda", "--prometheus=http://p:9090", "--max-concurrency=10")
    trigger = documents[-1]["spec"]["triggers"][0]["metadata"]
    assert trigger["threshold"] == "7"
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()
    for metric in re.findall(r"medusa_\w+", trigger["query"]):
        assert metric in page
    assert documents[-1]["spec"]["minReplicaCount"] == 1  # no pod, no metric: from zero it would never come back
    assert "needs KEDA" in text
    _, documents = rendered(*BASE, "--autoscaler=keda-http", "--host=fn.example.com")
    assert documents[-1]["spec"]["replicas"]["min"] == 0


def test_the_node_agent_comes_with_it() -> None:
    _, documents = rendered(*BASE, "--node-agent", "--node-agent-prewarm=torch=1")
    for document in documents:
        check(document)
    daemon, deployment, _ = documents[-3:]
    folder = daemon["spec"]["template"]["spec"]["volumes"][0]["hostPath"]["path"]
    assert deployment["spec"]["template"]["spec"]["volumes"][1]["hostPath"]["path"] == folder


def test_apply_hands_over_what_would_be_printed(tmp_path: Path) -> None:
    script = tmp_path / "kubectl"
    script.write_text(f"#!/bin/sh\ncat > {tmp_path}/applied; echo deployment.apps/qwen created\n")
    script.chmod(0o755)
    done = deploying.deploy("kubernetes", *BASE, "--apply", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert (done.returncode, done.stdout) == (0, "deployment.apps/qwen created\n"), done.stderr
    assert (tmp_path / "applied").read_text() == rendered(*BASE)[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--autoscaler=hpa"], "--autoscaler hpa needs --cpu"),
        (["--autoscaler=keda"], "--autoscaler keda needs --prometheus"),
        (["--prometheus=http://p"], "--autoscaler none takes no --prometheus"),
        (["--autoscaler=keda", "--prometheus=p:9090"], "--prometheus='p:9090'"),
        (["--autoscaler=keda-http"], "--autoscaler keda-http needs --host"),
        (["--autoscaler=keda-http", "--host=a b"], "--host='a b'"),
        (["--autoscaler=vpa"], "--autoscaler"),
        (["--timeout-s=0"], "--timeout-s=0"),
        (["--toleration=a:Never"], "--toleration='a:Never'"),
    ],
)
def test_bad_flags_are_named(arguments: list[str], said: str) -> None:
    assert said in refused(*BASE, *arguments)


def install(chart: Path, name: str, namespace: str, **values: Any) -> list[dict[str, Any]]:
    """What Helm renders, for the three forms that our templates have: nothing else may be in them."""
    given = yaml.safe_load((chart / "values.yaml").read_text())
    for path, value in values.items():
        *parents, last = path.split("__")
        place = given
        for parent in parents:
            place = place[parent]
        place[last] = value

    def look(path: str) -> Any:
        found: Any = {"Values": given, "Release": {"Name": name, "Namespace": namespace}}
        for part in path.split(".")[1:]:
            found = found[part]
        return found

    def expand(match: re.Match[str]) -> str:
        expression = match[1].strip()
        if text := re.fullmatch(r"toJson \(toString ([.\w]+)\)", expression):
            return json.dumps(str(look(text[1])))
        if value := re.fullmatch(r"toJson ([.\w]+)", expression):
            return json.dumps(look(value[1]))
        assert re.fullmatch(r"[.\w]+", expression), expression
        return str(look(expression))

    texts = [path.read_text() for path in sorted((chart / "templates").iterdir())]
    return [yaml.safe_load(re.sub(r"\{\{(.*?)\}\}", expand, text)) for text in texts]


def without_empty(value: Any) -> Any:
    """Empty lists and maps, which a chart has for what a user may set, mean as little as missing ones."""
    if isinstance(value, dict):
        return {key: without_empty(inner) for key, inner in value.items() if inner not in ({}, [])}
    return [without_empty(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [*MORE, "--min-scale=2", "--max-scale=5"],
        ["--autoscaler=keda", "--prometheus=http://p:9090"],
        ["--autoscaler=keda-http", "--host=fn.example.com"],
    ],
)
def test_a_chart_renders_what_deploy_kubernetes_does(arguments: list[str], tmp_path: Path) -> None:
    done = deploying.deploy("helm", *BASE, *arguments, f"--out={tmp_path / 'chart'}")
    assert done.returncode == 0, done.stderr
    chart = yaml.safe_load((tmp_path / "chart" / "Chart.yaml").read_text())
    assert (chart["apiVersion"], chart["name"]) == ("v2", "qwen")
    namespace = "models" if arguments and arguments[0] == MORE[0] else "default"
    found = install(tmp_path / "chart", "qwen", namespace)
    for document in found:
        check(document)
    _, documents = rendered(*BASE, *arguments)
    by_kind = {document["kind"]: without_empty(document) for document in documents}
    assert {document["kind"]: without_empty(document) for document in found} == by_kind


def test_a_release_has_its_own_name_and_values(tmp_path: Path) -> None:
    assert deploying.deploy("helm", *BASE, "--cpu=1", f"--out={tmp_path}").returncode == 0
    values = {"image": "other:2", "env__MEDUSA_HOLD": 30, "autoscaling__max": 3, "imagePullSecrets": [{"name": "r"}]}
    scaler, deployment, service = install(tmp_path, "mine", "team", **values)
    for document in (scaler, deployment, service):
        check(document)
        assert (document["metadata"]["name"], document["metadata"]["namespace"]) == ("mine", "team")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "other:2"
    assert {"name": "MEDUSA_HOLD", "value": "30"} in container["env"]
    assert scaler["spec"]["maxReplicas"] == 3
    assert scaler["spec"]["scaleTargetRef"]["name"] == "mine"
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]


def test_helm_is_called_and_files_are_kept(tmp_path: Path) -> None:
    script = tmp_path / "helm"
    script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/call\n')
    script.chmod(0o755)
    out = tmp_path / "chart"
    done = deploying.deploy("helm", *BASE, f"--out={out}", "--apply", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "call").read_text() == f"upgrade --install qwen {out} --namespace=default\n"
    (out / "values.yaml").write_text("mine: 1\n")
    assert "--force" in deploying.refused("helm", *BASE, f"--out={out}")
    assert "--apply needs --out" in deploying.refused("helm", *BASE, "--apply")
    printed = deploying.deploy("helm", *BASE)
    assert "# File: templates/deployment.yaml" in printed.stdout
