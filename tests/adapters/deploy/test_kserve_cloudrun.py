"""`medusa deploy kserve` and `cloudrun`: fields that these platforms read, and the pods that come of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import deploying
import kubernetes_validate
import pytest
import yaml
from deploying import knative_service

kserve = partial(deploying.rendered, "kserve")
cloudrun = partial(deploying.rendered, "cloudrun")
BASE = ("qwen", "--image=registry.example/qwen:1", "--model=s3://bucket/qwen")
# serving.kserve.io: what the two resources have beside the fields of a pod.
RUNTIME = {"supportedModelFormats", "protocolVersions", "containers", "volumes", "imagePullSecrets"}
SCALING = {"minReplicas", "maxReplicas", "scaleMetric", "scaleTarget", "containerConcurrency", "timeout", "model"}


def pod(runtime: dict[str, Any], service: dict[str, Any]) -> dict[str, Any]:
    """The pod that KServe makes: the runtime's container with what the model says of it, and the predictor's fields."""
    predictor = service["spec"]["predictor"]
    model = {key: value for key, value in predictor["model"].items() if key not in ("modelFormat", "runtime")}
    (container,) = runtime["spec"]["containers"]
    assert container["name"] == "kserve-container"
    spec = {key: value for key, value in runtime["spec"].items() if key in ("volumes", "imagePullSecrets")}
    spec |= {key: value for key, value in predictor.items() if key not in SCALING}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p"},
        "spec": spec | {"containers": [container | model]},
    }


@pytest.mark.parametrize(
    ("arguments", "mode"),
    [
        ([], "Serverless"),
        (
            [
                *("--mode=standard", "--min-scale=1", "--max-scale=4", "--memory=8Gi", "--gpu=1", "--secret=aws"),
                *("--pull-secret=registry", "--toleration=gpu", "--service-account=reader", "--label=a=b"),
            ],
            "RawDeployment",
        ),
    ],
)
def test_a_runtime_and_the_service_that_uses_it(arguments: list[str], mode: str) -> None:
    _, (runtime, service) = kserve(*BASE, *arguments)
    assert (runtime["apiVersion"], runtime["kind"]) == ("serving.kserve.io/v1alpha1", "ServingRuntime")
    assert (service["apiVersion"], service["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    assert set(runtime["spec"]) <= RUNTIME
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in [known["name"] for known in runtime["spec"]["supportedModelFormats"]]
    # KServe would fetch all of it before the container starts.
    assert "storageUri" not in model
    env = {entry["name"]: entry.get("value") for entry in model["env"]}
    assert env["MEDUSA_MODEL"] == "s3://bucket/qwen"
    assert (env["MEDUSA_PLATFORM"], env["MEDUSA_SERVED_MODEL_NAME"]) == ("kserve", service["metadata"]["name"])
    assert service["metadata"]["annotations"]["serving.kserve.io/deploymentMode"] == mode
    kubernetes_validate.validate(pod(runtime, service), "1.30", strict=True)


def test_a_name_of_its_own_for_the_model() -> None:
    _, (_, service) = kserve(*BASE, "--env=MEDUSA_SERVED_MODEL_NAME=other")
    model = service["spec"]["predictor"]["model"]
    assert [entry["value"] for entry in model["env"] if entry["name"] == "MEDUSA_SERVED_MODEL_NAME"] == ["other"]


def test_only_knative_goes_to_zero() -> None:
    assert "--mode standard needs --min-scale=1" in deploying.refused("kserve", *BASE, "--mode=standard")


MORE = [
    *("--region=europe-west1", "--cpu=4", "--memory=16Gi", "--gpu-type=nvidia-l4", "--min-scale=1", "--max-scale=3"),
    *("--secret=HF_TOKEN=hub/latest", "--label=team=search", "--service-account=fn@project.iam.gserviceaccount.com"),
    *("--annotation=run.googleapis.com/vpc-access-egress=all-traffic", "--timeout-s=900"),
]


@pytest.mark.parametrize("arguments", [[], MORE])
def test_a_cloud_run_service_is_a_knative_one_without_what_cloud_run_refuses(arguments: list[str]) -> None:
    _, (service,) = cloudrun(*BASE, *arguments)
    knative_service().validate(service)
    spec = service["spec"]["template"]["spec"]
    # The fields of Cloud Run's YAML reference; of a container as of its revision.
    assert set(spec) <= {"containerConcurrency", "timeoutSeconds", "serviceAccountName", "containers", "nodeSelector"}
    (container,) = spec["containers"]
    assert set(container) <= {"image", "ports", "env", "resources", "livenessProbe", "startupProbe"}
    assert set(container["resources"]) == {"limits"}
    for probe in (container["livenessProbe"], container.get("startupProbe", {"periodSeconds": 1})):
        assert probe.get("timeoutSeconds", 1) <= probe["periodSeconds"]
        assert probe.get("failureThreshold", 3) * probe["periodSeconds"] <= 240
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert int(env["MEDUSA_DRAIN"]) < 10
    assert not {"PORT", "K_SERVICE"} & set(env)
    # Instances that are started without a request have a CPU only until the startup probe has succeeded.
    assert ("startupProbe" in container) is ("--min-scale=1" in arguments)


def test_cloud_run_is_brought_there_by_gcloud(tmp_path: Path) -> None:
    script = tmp_path / "gcloud"
    script.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/call; cp "$4" {tmp_path}/applied\n')
    script.chmod(0o755)
    flags = ("--region=europe-west1", "--project=p")
    done = deploying.deploy("cloudrun", *BASE, *flags, "--apply", PATH=f"{tmp_path}:/usr/bin:/bin")
    assert done.returncode == 0, done.stderr
    call = (tmp_path / "call").read_text().split()
    assert call[:3] == ["run", "services", "replace"]
    assert call[4:] == ["--region=europe-west1", "--quiet", "--project=p"]
    assert yaml.safe_load((tmp_path / "applied").read_text()) == cloudrun(*BASE, "--region=europe-west1")[1][0]
    assert not Path(call[3]).exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--apply"], "--apply needs --region"),
        (["--region=Europe"], "--region='Europe'"),
        (["--cpu=3"], "--cpu=3"),
        (["--memory=64Gi"], "--memory=64"),
        (["--gpu-type=nvidia-l4"], "--gpu-type=nvidia-l4"),
        (["--secret=keys"], "expected VARIABLE=SECRET/VERSION"),
        (["--env=PORT=1"], "Cloud Run sets it itself"),
        (["--timeout-s=4000"], "--timeout-s=4000"),
        (["--label=Team=a"], "--label Team=a"),
        (["--min-scale=4", "--max-scale=2"], "above --max-scale"),
    ],
)
def test_bad_flags_are_named(arguments: list[str], said: str) -> None:
    assert said in deploying.refused("cloudrun", *BASE, *arguments)
