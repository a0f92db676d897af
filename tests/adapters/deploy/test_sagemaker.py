"""`medusa deploy sagemaker`: real boto3 against moto's server, and the limits before anything is called."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import boto3
import pytest
from deploying import AWS_KEYS
from medusa_adapters.deploy.aws.endpoint import EndpointClient
from medusa_adapters.deploy.manifests import sagemaker
from medusa_adapters.deploy.manifests.service_model import check_call
from medusa_command import medusa
from medusa_runtime.errors import ConfigError, DeployError
from moto.sagemaker.responses import SageMakerResponse

ROLE = "arn:aws:iam::123456789012:role/function"
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/qwen:1"
BASE = ("qwen", f"--image={IMAGE}", f"--role={ROLE}", "--poll-s=0.05")
APPLY = (*BASE, "--apply")


def update_endpoint(self: SageMakerResponse) -> str:
    """Return what moto lacks: the endpoint gets another configuration, as AWS' UpdateEndpoint does."""
    config = self._get_param("EndpointConfigName")
    self.sagemaker_backend.describe_endpoint_config(config)
    endpoint = self.sagemaker_backend.endpoints[self._get_param("EndpointName")]
    endpoint.endpoint_config_name = config
    return json.dumps({"EndpointArn": endpoint.arn})


@pytest.fixture
def aws(empty_aws: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SageMaker's control plane, empty; the same for this process and for the command."""
    monkeypatch.setattr(SageMakerResponse, "update_endpoint", update_endpoint, raising=False)
    return boto3.client("sagemaker")


def deploy(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return medusa("deploy", "sagemaker", *arguments, environ=environ)


def refused(*arguments: str, **environ: str) -> str:
    done = deploy(*arguments, **environ)
    assert done.returncode in (1, 2), done
    (line,) = done.stderr.splitlines()
    assert line.startswith("medusa: ")
    return line


def dry(*arguments: str) -> dict[str, Any]:
    """The planned calls by name. The endpoint cannot be reached: a dry run calls nothing."""
    done = deploy(*BASE, *arguments, AWS_ENDPOINT_URL="http://127.0.0.1:9")
    assert done.returncode == 0, done.stderr
    return {call["operation"]: call["parameters"] for call in json.loads(done.stdout)}


def test_serverless_endpoint_is_made_updated_and_deleted(aws: Any) -> None:
    made = deploy(*APPLY, "--memory-mb=2048", "--max-concurrency=20", "--provisioned-concurrency=3", "--model=s3://b/q")
    assert made.returncode == 0, made.stderr
    assert "CreateModel qwen-" in made.stdout
    assert "qwen: InService" in made.stdout
    endpoint = aws.describe_endpoint(EndpointName="qwen")
    (variant,) = aws.describe_endpoint_config(EndpointConfigName=endpoint["EndpointConfigName"])["ProductionVariants"]
    serverless = {"MemorySizeInMB": 2048, "MaxConcurrency": 20, "ProvisionedConcurrency": 3}
    assert variant["ServerlessConfig"] == serverless
    container = aws.describe_model(ModelName=variant["ModelName"])["PrimaryContainer"]
    assert container["Image"] == IMAGE
    assert container["Environment"]["MEDUSA_MODEL"] == "s3://b/q"
    assert container["Environment"]["MEDUSA_PLATFORM"] == "sagemaker"
    assert container["Environment"]["SAGEMAKER_SERVERLESS"] == "true"

    assert "add --update" in refused(*APPLY)
    updated = deploy(*APPLY, "--update", "--memory-mb=4096")
    assert updated.returncode == 0, updated.stderr
    second = aws.describe_endpoint(EndpointName="qwen")["EndpointConfigName"]
    assert second != endpoint["EndpointConfigName"]
    # The version before is gone, its model as well.
    assert [c["EndpointConfigName"] for c in aws.list_endpoint_configs()["EndpointConfigs"]] == [second]
    assert [model["ModelName"] for model in aws.list_models()["Models"]] == [second]

    assert deploy("qwen", "--delete", "--apply", "--poll-s=0.05").returncode == 0
    assert not aws.list_endpoints()["Endpoints"]
    assert not aws.list_endpoint_configs()["EndpointConfigs"]
    assert not aws.list_models()["Models"]
    assert "no endpoint of this name" in refused("qwen", "--delete", "--apply")
    assert "no endpoint of this name to update" in refused(*APPLY, "--update")


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        ([], ["medusa: nothing was called; add --apply to make these calls"]),
        (["--update", "--no-wait"], ["medusa: nothing was called; add --apply to make these calls"]),
        (
            ["--dry-run"],
            [
                "medusa: --dry-run is what happens without --apply now; leave it out",
                "medusa: nothing was called; add --apply to make these calls",
            ],
        ),
    ],
)
def test_without_apply_the_calls_are_printed_and_a_line_says_so(aws: Any, flags: list[str], lines: list[str]) -> None:
    """As this command once acted, a script that relies on it must see that it does no more."""
    done = deploy(*BASE, *flags)
    assert done.returncode == 0
    assert done.stderr.splitlines() == lines
    assert [call["operation"] for call in json.loads(done.stdout)][:2] == ["CreateModel", "CreateEndpointConfig"]
    assert not aws.list_endpoints()["Endpoints"]
    assert not aws.list_models()["Models"]


def test_delete_without_apply_deletes_nothing(aws: Any) -> None:
    assert deploy(*APPLY).returncode == 0
    done = deploy("qwen", "--delete")
    assert json.loads(done.stdout) == [{"operation": "DeleteEndpoint", "parameters": {"EndpointName": "qwen"}}]
    assert "nothing was called; add --apply" in done.stderr
    assert len(aws.list_endpoints()["Endpoints"]) == 1


def test_vpc_tags_and_autoscaling_of_a_real_time_endpoint(aws: Any) -> None:
    network = ("--subnet=subnet-0a1b2c3d", "--subnet=subnet-1a1b2c3d", "--security-group=sg-0a1b2c3d")
    flags = ("--instance-type=ml.m5.large", *network, "--tag=team=search", "--min-scale=1", "--max-scale=4")
    made = deploy(*APPLY, *flags, "--concurrency=10")
    assert made.returncode == 0, made.stderr
    endpoint = aws.describe_endpoint(EndpointName="qwen")
    config = aws.describe_endpoint_config(EndpointConfigName=endpoint["EndpointConfigName"])
    model = aws.describe_model(ModelName=endpoint["EndpointConfigName"])
    assert model["VpcConfig"]["Subnets"] == ["subnet-0a1b2c3d", "subnet-1a1b2c3d"]
    assert model["VpcConfig"]["SecurityGroupIds"] == ["sg-0a1b2c3d"]
    for arn in (endpoint["EndpointArn"], config["EndpointConfigArn"], model["ModelArn"]):
        assert aws.list_tags(ResourceArn=arn)["Tags"] == [{"Key": "team", "Value": "search"}], arn
    scaler = boto3.client("application-autoscaling")
    (target,) = scaler.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
    assert target["ResourceId"] == "endpoint/qwen/variant/AllTraffic"
    assert (target["MinCapacity"], target["MaxCapacity"]) == (1, 4)
    (policy,) = scaler.describe_scaling_policies(ServiceNamespace="sagemaker")["ScalingPolicies"]
    assert policy["TargetTrackingScalingPolicyConfiguration"]["TargetValue"] == 7.0

    updated = deploy(*APPLY, "--update", *flags, "--tag=stage=two")
    assert updated.returncode == 0, updated.stderr
    assert {"Key": "stage", "Value": "two"} in aws.list_tags(ResourceArn=endpoint["EndpointArn"])["Tags"]
    deleted = deploy("qwen", "--delete", "--apply", "--poll-s=0.05")
    assert deleted.returncode == 0, deleted.stderr
    assert not scaler.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]


def test_provisioned_concurrency_scales() -> None:
    calls = dry("--provisioned-concurrency=2", "--max-scale=8")
    target = calls["RegisterScalableTarget"]
    assert target["ScalableDimension"] == "sagemaker:variant:DesiredProvisionedConcurrency"
    assert calls["PutScalingPolicy"]["TargetTrackingScalingPolicyConfiguration"]["TargetValue"] == 0.7


def test_a_serverless_endpoint_becomes_real_time_and_never_goes_back(aws: Any) -> None:
    assert deploy(*APPLY).returncode == 0
    updated = deploy(*APPLY, "--update", "--instance-type=ml.m5.large")
    assert updated.returncode == 0, updated.stderr
    config = aws.describe_endpoint(EndpointName="qwen")["EndpointConfigName"]
    (variant,) = aws.describe_endpoint_config(EndpointConfigName=config)["ProductionVariants"]
    assert (variant["InstanceType"], variant["InitialInstanceCount"]) == ("ml.m5.large", 1)
    container = aws.describe_model(ModelName=variant["ModelName"])["PrimaryContainer"]
    assert "SAGEMAKER_SERVERLESS" not in container["Environment"]
    assert "makes none of these serverless" in refused(*APPLY, "--update")
    assert [model["ModelName"] for model in aws.list_models()["Models"]] == [config]


def test_an_endpoint_that_failed_can_only_be_deleted(aws: Any) -> None:
    client = EndpointClient("us-east-1", lambda _: None)
    failed = {"EndpointName": "qwen", "EndpointStatus": "Failed", "FailureReason": "no ping"}
    with pytest.raises(ConfigError, match=r"qwen is Failed \(no ping\) and can only be deleted"):
        client.check_update(failed, serverless=True)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"AWS_DEFAULT_REGION": ""}, "region is missing: give --region"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "Unable to locate credentials"),
        ({"AWS_SECRET_ACCESS_KEY": ""}, "AWS cannot be called: Partial credentials found"),
        ({"AWS_PROFILE": "none-such"}, "AWS cannot be called: The config profile (none-such) could not be found"),
    ],
)
def test_what_is_missing_to_call_aws_is_one_line(environ: dict[str, str], said: str, tmp_path: Path) -> None:
    plain = {"HOME": str(tmp_path), "AWS_EC2_METADATA_DISABLED": "true", "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    given = {name: value for name, value in {**AWS_KEYS, **plain, **environ}.items() if value}
    line = refused(*APPLY, **dict.fromkeys(AWS_KEYS, "") | given)
    assert said in line
    assert ("--region" in line) is ("AWS_DEFAULT_REGION" in environ)


def test_what_was_made_is_deleted_when_a_later_call_fails(aws: Any) -> None:
    client = EndpointClient("us-east-1", lambda _: None)
    calls = [
        ("CreateModel", {"ModelName": "m", "PrimaryContainer": {"Image": IMAGE}, "ExecutionRoleArn": ROLE}),
        ("CreateEndpoint", {"EndpointName": "e", "EndpointConfigName": "none-such"}),
    ]
    with pytest.raises(DeployError, match="refused CreateEndpoint"):
        client.create(calls)
    assert not aws.list_models()["Models"]


def test_an_endpoint_that_fails_tells_sagemakers_reason(monkeypatch: pytest.MonkeyPatch, aws: Any) -> None:
    told: list[str] = []
    client = EndpointClient("us-east-1", told.append, poll_s=0)
    states = iter(
        [{"EndpointStatus": "Creating"}] * 2 + [{"EndpointStatus": "Failed", "FailureReason": "ping did not answer"}]
    )
    monkeypatch.setattr(client, "describe", lambda name: next(states))
    with pytest.raises(DeployError, match="qwen is Failed: ping did not answer"):
        client.wait("qwen", "qwen-2")
    assert [line.split(": ")[1] for line in told] == ["Creating", "Failed"]


def test_an_update_that_is_rolled_back_is_no_success(monkeypatch: pytest.MonkeyPatch, aws: Any) -> None:
    client = EndpointClient("us-east-1", lambda _: None, poll_s=0)
    variant = {
        "VariantName": "v",
        "ModelName": "qwen-2",
        "ServerlessConfig": {"MemorySizeInMB": 1024, "MaxConcurrency": 1},
    }
    aws.create_model(ModelName="qwen-2", PrimaryContainer={"Image": IMAGE}, ExecutionRoleArn=ROLE)
    aws.create_endpoint_config(EndpointConfigName="qwen-2", ProductionVariants=[variant])
    before = {"EndpointStatus": "InService", "EndpointConfigName": "qwen-1"}
    rolled_back = before | {"FailureReason": "ping did not answer"}
    states = [before, before | {"EndpointStatus": "Updating"}, *[rolled_back] * 3]
    monkeypatch.setattr(client, "describe", lambda name: states.pop(0))
    with pytest.raises(DeployError, match="went back to qwen-1: ping did not answer"):
        client.wait("qwen", "qwen-2")
    assert not aws.list_endpoint_configs()["EndpointConfigs"]
    assert not aws.list_models()["Models"]
    states = [before, before | {"EndpointStatus": "Updating"}, before | {"EndpointConfigName": "qwen-2"}]
    client.wait("qwen", "qwen-2")
    assert not states


def test_real_time_endpoint_with_weights_from_s3() -> None:
    calls = dry("--instance-type=ml.g5.xlarge", "--instance-count=2", "--gpu", "--model-data=s3://bucket/qwen")
    container = calls["CreateModel"]["PrimaryContainer"]
    source = {"S3Uri": "s3://bucket/qwen/", "S3DataType": "S3Prefix", "CompressionType": "None"}
    assert container["ModelDataSource"] == {"S3DataSource": source}
    assert "ModelDataUrl" not in container
    assert container["Environment"]["MEDUSA_MODEL"] == "/opt/ml/model"
    (variant,) = calls["CreateEndpointConfig"]["ProductionVariants"]
    assert (variant["InstanceType"], variant["InitialInstanceCount"]) == ("ml.g5.xlarge", 2)
    assert "ServerlessConfig" not in variant
    archive = dry("--instance-type=ml.m5.large", "--model-data=s3://bucket/qwen/model.tar.gz")["CreateModel"]
    assert archive["PrimaryContainer"]["ModelDataUrl"] == "s3://bucket/qwen/model.tar.gz"
    assert "ModelDataSource" not in archive["PrimaryContainer"]


def test_limits_are_the_services_own() -> None:
    """The constants here against botocore's model, so that they follow AWS."""
    import botocore.session

    shape = botocore.session.get_session().get_service_model("sagemaker").shape_for("ProductionVariantServerlessConfig")
    memory, most = shape.members["MemorySizeInMB"].metadata, shape.members["MaxConcurrency"].metadata
    assert (memory["min"], memory["max"]) == (sagemaker.MEMORY_MB[0], sagemaker.MEMORY_MB[-1])
    assert most["max"] == sagemaker.MOST_CONCURRENCY


def test_the_models_check_is_strict() -> None:
    good = dry("--memory-mb=1024")
    for operation, parameters in good.items():
        check_call("sagemaker", operation, parameters)
    variant = good["CreateEndpointConfig"]["ProductionVariants"][0]
    for change, said in (
        ({"ServerlessConfig": {"MemorySizeInMB": 1024, "MaxConcurrency": 500}}, "MaxConcurrency=500"),
        ({"ServerlessConfig": {"MemorySizeInMB": "1024", "MaxConcurrency": 5}}, "expected a number"),
        ({"ServerlessConfig": {"MaxConcurrency": 5}}, "MemorySizeInMB is missing"),
        ({"InstanceType": "ml.g99.huge"}, "InstanceType='ml.g99.huge'"),
        ({"Typo": 1}, "Typo is unknown"),
        ({"VariantName": "a_b"}, "expected the form"),
    ):
        config = good["CreateEndpointConfig"] | {"ProductionVariants": [variant | change]}
        with pytest.raises(ConfigError, match=said):
            check_call("sagemaker", "CreateEndpointConfig", config)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--memory-mb=1500"], "--memory-mb=1500"),
        (["--memory-mb=7168"], "--memory-mb=7168"),
        (["--max-concurrency=201"], "--max-concurrency=201"),
        (["--max-concurrency=0"], "--max-concurrency=0"),
        (["--provisioned-concurrency=11"], "--provisioned-concurrency=11"),
        (["--gpu"], "no GPUs"),
        (["--gpu", "--instance-type=ml.m5.large"], "ml.m5.large has none"),
        (["--instance-type=ml.x1.fast"], "InstanceType='ml.x1.fast'"),
        (["--instance-type=ml.m5.large", "--instance-count=0"], "--instance-count=0"),
        (["--model-data=s3://bucket/prefix/"], "takes no uncompressed"),
        (["--model-data=/local/model"], "--model-data='/local/model'"),
        (["--role=admin"], "ExecutionRoleArn"),
        (["--apply", "--dry-run"], "--dry-run and --apply"),
        (["--subnet=subnet-1"], "--subnet and --security-group"),
        (["--subnet=subnet-1", "--security-group=sg-1"], "serverless joins no VPC"),
        (["--tag=team"], "--tag='team'"),
        (["--tag=team=" + "x" * 300], "Tags[0].Value"),
        (["--max-scale=4"], "scales --provisioned-concurrency"),
        (["--min-scale=4"], "--min-scale needs --max-scale"),
        (["--instance-type=ml.m5.large", "--max-scale=4", "--instance-count=5"], "--instance-count=5"),
        (["--instance-type=ml.m5.large", "--max-scale=2", "--no-wait"], "--no-wait"),
        (["--image="], "--image is missing"),
        (["--update", "--delete"], "one of them"),
        (["--instance-count=2"], "--instance-count: the endpoint would be serverless"),
        (["--instance-type=ml.m5.large", "--memory-mb=2048"], "--memory-mb: the endpoint would be real-time"),
        (["--env=MEDUSA_TIMEOUT=long"], "MEDUSA_TIMEOUT='long'"),
    ],
)
def test_bad_flags_are_named_before_anything_is_called(arguments: list[str], said: str) -> None:
    assert said in refused(*BASE, *arguments, AWS_ENDPOINT_URL="http://127.0.0.1:9", **AWS_KEYS)


def test_bad_names_and_no_role() -> None:
    assert "at most 43" in refused("q" * 50, f"--image={IMAGE}", f"--role={ROLE}")
    assert "--role is missing" in refused("qwen", f"--image={IMAGE}")


def test_image_size() -> None:
    sagemaker.check_image_size(3 * 10**9, IMAGE)
    with pytest.raises(ConfigError, match="slim"):
        sagemaker.check_image_size(11 * 1024**3, IMAGE)


def test_image_size_is_asked_of_ecr(aws: Any) -> None:
    ecr = boto3.client("ecr")
    ecr.create_repository(repositoryName="qwen")
    manifest = {"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json"}
    manifest |= {"config": {"size": 10, "digest": "sha256:" + "0" * 64}, "layers": [{"size": 1, "digest": "sha256:1"}]}
    ecr.put_image(repositoryName="qwen", imageTag="1", imageManifest=json.dumps(manifest))
    told: list[str] = []
    client = EndpointClient("us-east-1", told.append)
    expected = ecr.describe_images(repositoryName="qwen", imageIds=[{"imageTag": "1"}])["imageDetails"][0]
    assert client.image_bytes(IMAGE) == expected.get("imageSizeInBytes", 0)
    assert not told
    assert client.image_bytes("docker.io/qwen:1") is None
    assert client.image_bytes(IMAGE.replace("qwen:1", "other:1")) is None
    assert "size is unknown" in told[0]


def test_a_control_plane_that_cannot_be_reached_is_one_line() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        line = refused(
            *APPLY,
            AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}",
            AWS_MAX_ATTEMPTS="1",
            AWS_EC2_METADATA_DISABLED="true",
            **AWS_KEYS,
        )
    assert "DescribeEndpoint" in line
    assert line.endswith("[Deploy.Failed]")


@pytest.mark.parametrize(
    ("platform", "package"), [("sagemaker", "boto3"), ("sagemaker", "botocore"), ("knative", "yaml")]
)
def test_missing_packages_name_the_command(platform: str, package: str) -> None:
    script = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from medusa_adapters.cli.main import main\n"
        f"sys.exit(main(['deploy', {platform!r}, 'qwen', '--image=q:1']"
        f" + (['--role={ROLE}', '--apply'] if {platform!r} == 'sagemaker' else [])))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2, done
    assert 'pip install "medusa-runtime[deploy]"' in done.stderr
    assert len(done.stderr.splitlines()) == 1
