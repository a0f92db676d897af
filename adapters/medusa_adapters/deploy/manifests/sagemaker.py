"""A function as SageMaker's three objects: model, endpoint configuration, endpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_runtime.errors import ConfigError

from . import values
from .function import Function

MEMORY_MB = tuple(range(1024, 6144 + 1, 1024))
MOST_CONCURRENCY = 200
MOST_SERVERLESS_IMAGE_BYTES = 10 * 1024**3
MODEL_FOLDER = "/opt/ml/model"
TIMEOUT_S = 60  # for /invocations; a streamed answer may take longer, but must begin
VARIANT = "AllTraffic"
_INSTANCES = "sagemaker:variant:DesiredInstanceCount"
_PROVISIONED = "sagemaker:variant:DesiredProvisionedConcurrency"
_S3 = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/.*)?")
_GPU_FAMILIES = re.compile(r"ml\.(p\d|g\d)")
_MOST_NAME = 63 - len("-20261231-235959-999")


@dataclass(frozen=True)
class Capacity:
    """The capacity of an endpoint, which is serverless if ``instance_type`` is None."""

    memory_mb: int = 4096
    max_concurrency: int = 10
    provisioned_concurrency: int | None = None
    instance_type: str | None = None
    instance_count: int = 1
    needs_gpu: bool = False

    @property
    def serverless(self) -> bool:
        return self.instance_type is None


@dataclass(frozen=True)
class Vpc:
    """The subnets that instances are in, and the security groups that they have."""

    subnets: Sequence[str]
    security_groups: Sequence[str]


@dataclass(frozen=True)
class Autoscaling:
    """Between how many instances (serverless: provisioned concurrency) an endpoint scales, and at what load.

    ``target``: requests that an instance has at a time; on serverless the share of provisioned concurrency in use.
    """

    least: int
    most: int
    target: float
    cooldown_s: int = 300


def check_network(capacity: Capacity, vpc: Vpc | None) -> None:
    """Raise ConfigError for an incomplete VPC, and for a VPC around a serverless endpoint."""
    if vpc is None:
        return
    if not vpc.subnets or not vpc.security_groups:
        raise ConfigError("--subnet and --security-group: expected both of them or neither")
    if capacity.serverless:
        raise ConfigError("--subnet: SageMaker serverless joins no VPC; add --instance-type, e.g. ml.m5.large")


def check_scaling(capacity: Capacity, scaling: Autoscaling) -> None:
    """Raise ConfigError if the endpoint's first size is not between the limits."""
    values.check_range(scaling.least, 1, 1000, "--min-scale")
    values.check_range(scaling.most, scaling.least, 1000, "--max-scale")
    first, flag = capacity.instance_count, "--instance-count"
    if capacity.serverless:
        flag = "--provisioned-concurrency"
        if capacity.provisioned_concurrency is None:
            raise ConfigError("--max-scale: a serverless endpoint scales --provisioned-concurrency; add it")
        first = capacity.provisioned_concurrency
        values.check_range(scaling.most, scaling.least, capacity.max_concurrency, "--max-scale", "(--max-concurrency)")
    values.check_range(first, scaling.least, scaling.most, flag, "(--min-scale to --max-scale)")


def check(capacity: Capacity, model_data: str | None) -> None:
    """Raise ConfigError for values that SageMaker refuses. It names the flag."""
    if model_data is not None and not _S3.fullmatch(model_data):
        raise ConfigError(
            f"--model-data={model_data!r} cannot be used: expected s3://bucket/prefix/ or s3://…/model.tar.gz"
        )
    if not capacity.serverless:
        if capacity.needs_gpu and not _GPU_FAMILIES.match(str(capacity.instance_type)):
            raise ConfigError(f"--gpu: {capacity.instance_type} has none; expected an ml.g… or ml.p… instance")
        values.check_range(capacity.instance_count, 1, 1000, "--instance-count")
        return
    if capacity.needs_gpu:
        raise ConfigError("--gpu: SageMaker serverless has no GPUs; add --instance-type, e.g. ml.g5.xlarge")
    if capacity.memory_mb not in MEMORY_MB:
        raise ConfigError(f"--memory-mb={capacity.memory_mb} cannot be used: expected {', '.join(map(str, MEMORY_MB))}")
    values.check_range(capacity.max_concurrency, 1, MOST_CONCURRENCY, "--max-concurrency")
    if capacity.provisioned_concurrency is not None:
        values.check_range(
            capacity.provisioned_concurrency,
            1,
            capacity.max_concurrency,
            "--provisioned-concurrency",
            "(--max-concurrency)",
        )
    if model_data is not None and not is_archive(model_data):
        raise ConfigError(
            f"--model-data={model_data!r}: SageMaker serverless takes no uncompressed prefix; give a model.tar.gz, "
            "or --model s3://…, which the instance itself reads while it starts"
        )


def check_image_size(size_bytes: int, image: str) -> None:
    """Raise ConfigError for an image that can never fit: the limit is for its unpacked size, which is larger."""
    if size_bytes > MOST_SERVERLESS_IMAGE_BYTES:
        raise ConfigError(
            f"--image={image!r} has {size_bytes / 1e9:.1f} GB even compressed; SageMaker serverless takes at most "
            f"{MOST_SERVERLESS_IMAGE_BYTES / 1e9:.1f} GB: build on the slim image"
        )


def is_archive(model_data: str) -> bool:
    return model_data.endswith((".tar.gz", ".tgz"))


def check_name(name: str) -> str:
    """Raise ConfigError for a bad name. It must leave room for a time stamp, which models and configurations add."""
    if len(values.name(name)) > _MOST_NAME:
        raise ConfigError(f"NAME={name!r} cannot be used: expected at most {_MOST_NAME} characters")
    return name


def model(
    name: str,
    function: Function,
    *,
    role: str,
    model_data: str | None,
    serverless: bool = False,
    vpc: Vpc | None = None,
    tags: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the parameters of CreateModel."""
    # Serverless sets no variable that identifies it, and does not pass streams on.
    environment = ({"SAGEMAKER_SERVERLESS": "true"} if serverless else {}) | dict(function.env)
    container: dict[str, Any] = {"Image": function.image, "Environment": environment}
    if model_data is not None:
        environment.setdefault("MEDUSA_MODEL", MODEL_FOLDER)
        if is_archive(model_data):
            container["ModelDataUrl"] = model_data
        else:
            container["ModelDataSource"] = {
                "S3DataSource": {
                    "S3Uri": model_data if model_data.endswith("/") else model_data + "/",
                    "S3DataType": "S3Prefix",
                    "CompressionType": "None",
                }
            }
    found = {"ModelName": name, "PrimaryContainer": container, "ExecutionRoleArn": role} | tagged(tags)
    if vpc is not None:
        found["VpcConfig"] = {"Subnets": list(vpc.subnets), "SecurityGroupIds": list(vpc.security_groups)}
    return found


def endpoint_config(
    name: str, capacity: Capacity, *, startup_timeout_s: int, tags: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the parameters of CreateEndpointConfig, for the model of the same name."""
    variant: dict[str, Any] = {"VariantName": VARIANT, "ModelName": name}
    if capacity.serverless:
        serverless = {"MemorySizeInMB": capacity.memory_mb, "MaxConcurrency": capacity.max_concurrency}
        if capacity.provisioned_concurrency is not None:
            serverless["ProvisionedConcurrency"] = capacity.provisioned_concurrency
        variant["ServerlessConfig"] = serverless
    else:
        variant |= {
            "InstanceType": capacity.instance_type,
            "InitialInstanceCount": capacity.instance_count,
            "InitialVariantWeight": 1.0,
            "ContainerStartupHealthCheckTimeoutInSeconds": startup_timeout_s,
            "ModelDataDownloadTimeoutInSeconds": max(startup_timeout_s, 600),
        }
    return {"EndpointConfigName": name, "ProductionVariants": [variant]} | tagged(tags)


def endpoint(name: str, config: str, tags: Mapping[str, str] | None = None) -> Mapping[str, Any]:
    """Return the parameters of CreateEndpoint and, without tags, of UpdateEndpoint."""
    return {"EndpointName": name, "EndpointConfigName": config} | tagged(tags)


def tagged(tags: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the parameter ``Tags``, or nothing."""
    return {"Tags": [{"Key": key, "Value": value} for key, value in tags.items()]} if tags else {}


def autoscaling(name: str, capacity: Capacity, scaling: Autoscaling) -> list[tuple[str, dict[str, Any]]]:
    """Return the two calls of Application Auto Scaling that scale an endpoint in service."""
    target = {
        "ServiceNamespace": "sagemaker",
        "ResourceId": f"endpoint/{name}/variant/{VARIANT}",
        "ScalableDimension": _PROVISIONED if capacity.serverless else _INSTANCES,
    }
    metric = (
        "SageMakerVariantProvisionedConcurrencyUtilization"
        if capacity.serverless
        else "SageMakerVariantConcurrentRequestsPerModelHighResolution"
    )
    tracking = {
        "PredefinedMetricSpecification": {"PredefinedMetricType": metric},
        "TargetValue": scaling.target,
        "ScaleInCooldown": scaling.cooldown_s,
        "ScaleOutCooldown": 0,
    }
    policy = {
        "PolicyName": f"{name}-load",
        **target,
        "PolicyType": "TargetTrackingScaling",
        "TargetTrackingScalingPolicyConfiguration": tracking,
    }
    limits = {"MinCapacity": scaling.least, "MaxCapacity": scaling.most}
    return [("RegisterScalableTarget", {**target, **limits}), ("PutScalingPolicy", policy)]
