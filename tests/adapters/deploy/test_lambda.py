"""`medusa deploy lambda`: real boto3 against moto's server, and the limits before anything is called."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import boto3
import deploying
import pytest
from deploying import AWS_KEYS

IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/fn:1"
ROLE = "arn:aws:iam::123456789012:role/fn"
BASE = ("fn", f"--image={IMAGE}", f"--role={ROLE}")
deploy = partial(deploying.deploy, "lambda")


@pytest.fixture
def aws(empty_aws: None) -> Any:
    """Lambda's control plane, empty but for a role; the same for this process and for the command."""
    boto3.client("iam").create_role(RoleName="fn", AssumeRolePolicyDocument="{}")
    ecr = boto3.client("ecr")
    ecr.create_repository(repositoryName="fn")
    for tag in ("1", "2"):
        layers = [{"size": 1, "digest": f"sha256:{tag}"}]
        manifest = {"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json"}
        manifest |= {"config": {"size": 10, "digest": "sha256:" + tag * 64}, "layers": layers}
        ecr.put_image(repositoryName="fn", imageTag=tag, imageManifest=json.dumps(manifest))
    return boto3.client("lambda")


def test_a_function_is_made_updated_and_deleted(aws: Any) -> None:
    printed = deploy(*BASE)
    assert "nothing was called; add --apply" in printed.stderr
    assert not aws.list_functions()["Functions"]

    made = deploy(*BASE, "--apply", "--memory-mb=4096", "--timeout-s=120", "--model=s3://b/q", "--tag=team=search")
    assert made.returncode == 0, made.stderr
    found = aws.get_function(FunctionName="fn")
    assert found["Code"]["ImageUri"] == IMAGE
    assert found["Tags"] == {"team": "search"}
    configuration = found["Configuration"]
    assert (configuration["MemorySize"], configuration["Timeout"]) == (4096, 120)
    variables = configuration["Environment"]["Variables"]
    assert (variables["MEDUSA_MODEL"], variables["MEDUSA_PLATFORM"]) == ("s3://b/q", "lambda")
    assert int(variables["MEDUSA_HOLD"]) < 120

    again = deploy(*BASE, "--apply")
    assert again.returncode == 1
    assert "Lambda refused CreateFunction" in again.stderr
    assert aws.list_functions()["Functions"]  # what was there before is not deleted

    updated = deploy("fn", f"--image={IMAGE[:-1]}2", f"--role={ROLE}", "--update", "--apply", "--memory-mb=1024")
    assert updated.returncode == 0, updated.stderr
    assert aws.get_function_configuration(FunctionName="fn")["MemorySize"] == 1024
    assert deploy("fn", "--delete", "--apply").returncode == 0
    assert not aws.list_functions()["Functions"]


def test_a_public_url(aws: Any) -> None:
    made = deploy(*BASE, "--apply", "--url=public")
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines()[-1] == aws.get_function_url_config(FunctionName="fn")["FunctionUrl"]
    statements = json.loads(aws.get_policy(FunctionName="fn")["Policy"])["Statement"]
    assert [statement["Action"] for statement in statements] == ["lambda:InvokeFunctionUrl", "lambda:InvokeFunction"]


def test_the_entry_point_is_the_adapters() -> None:
    done = deploy(*BASE)
    (call,) = json.loads(done.stdout)
    *_, module = call["parameters"]["ImageConfig"]["EntryPoint"]
    from importlib.util import find_spec

    assert find_spec(module) is not None
    assert call["parameters"]["PackageType"] == "Image"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--timeout-s=901"], "--timeout-s=901"),
        (["--memory-mb=64"], "--memory-mb=64"),
        (["--storage-mb=100"], "--storage-mb=100"),
        (["--subnet=subnet-1"], "expected both of them or neither"),
        (["--role="], "--role is missing"),
        (["--role=admin"], "Role='admin'"),
        (["--update", "--delete"], "one of them"),
        (["--update", "--url=public"], "expected without --update"),
        (["--tag=a"], "--tag='a'"),
    ],
)
def test_bad_flags_are_named_before_anything_is_called(arguments: list[str], said: str) -> None:
    line = deploying.refused("lambda", *BASE, *arguments, AWS_ENDPOINT_URL="http://127.0.0.1:9", **AWS_KEYS)
    assert said in line
