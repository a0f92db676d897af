"""`medusa deploy sagemaker`: a serverless or real-time endpoint, made, updated or deleted through boto3."""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from medusa_runtime.errors import ConfigError, MissingPackageError

from .manifests import sagemaker
from .manifests.function import add_arguments as add_function_arguments
from .manifests.function import function

if TYPE_CHECKING:
    from .endpoint import Calls, EndpointClient

_LEAST_STARTUP_S, _MOST_STARTUP_S = 60, 3600
_STARTS = 10  # the health check waits for ten measured starts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_function_arguments(parser)
    parser.add_argument("--role", metavar="ARN", help="execution role")
    parser.add_argument(
        "--model-data",
        metavar="S3",
        help="weights that SageMaker puts into /opt/ml/model: a prefix (not on serverless) or a model.tar.gz",
    )
    serverless = parser.add_argument_group("serverless (the default)")
    serverless.add_argument("--memory-mb", type=int, help="1024 to 6144 in steps of 1024 (4096)")
    serverless.add_argument("--max-concurrency", type=int, help="instances, 1 to 200 (10)")
    serverless.add_argument("--provisioned-concurrency", type=int, help="instances that are always warm")
    real_time = parser.add_argument_group("real-time")
    real_time.add_argument("--instance-type", metavar="ml.…", help="e.g. ml.g5.xlarge; makes the endpoint real-time")
    real_time.add_argument("--instance-count", type=int, help="default: 1")
    parser.add_argument(
        "--gpu", action="store_true", help="the function needs a GPU: checked before anything is called"
    )
    parser.add_argument("--region", help="default: as boto3 finds it")
    parser.add_argument("--update", action="store_true", help="a new version behind the endpoint that is there")
    parser.add_argument("--delete", action="store_true", help="delete the endpoint, its configuration and its model")
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is in service")
    parser.add_argument("--dry-run", action="store_true", help="print the calls as JSON; nothing is called")
    parser.add_argument("--poll-s", type=float, default=10.0, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    if arguments.update and arguments.delete:
        raise ConfigError("--update and --delete: expected one of them")
    name = sagemaker.check_name(arguments.name)
    if arguments.delete:
        return _delete(arguments, name)
    calls = plan(arguments, name)
    if arguments.dry_run:
        print(json.dumps([{"operation": operation, "parameters": given} for operation, given in calls], indent=2))
        return 0
    client = _client(arguments)
    found = client.describe(name)
    if found is None and arguments.update:
        raise ConfigError(
            f"NAME={name!r}: there is no endpoint of this name to update; leave --update out to create it"
        )
    if found is not None and not arguments.update:
        raise ConfigError(f"NAME={name!r}: there is an endpoint of this name; add --update to give it this version")
    if found is not None:
        client.check_update(found, serverless=arguments.instance_type is None)
    if arguments.instance_type is None:
        size = client.image_bytes(arguments.image)
        if size is not None:
            sagemaker.check_image_size(size, arguments.image)
    client.create(calls)
    if arguments.no_wait:
        return 0
    client.wait(name, calls[-1][1]["EndpointConfigName"])
    if found is not None:
        client.delete_config(found["EndpointConfigName"])
    return 0


def plan(arguments: argparse.Namespace, name: str) -> Calls:
    """The calls, checked against the limits and against SageMaker's own model. Raises ConfigError."""
    capacity = _capacity(arguments)
    sagemaker.check(capacity, arguments.model_data)
    if not arguments.role:
        raise ConfigError(
            "--role is missing: expected the ARN of the execution role, e.g. arn:aws:iam::123456789012:role/fn"
        )
    described = function(arguments, platform="sagemaker", timeout_s=sagemaker.TIMEOUT_S)
    now = datetime.now(UTC)
    version = f"{name}-{now:%Y%m%d-%H%M%S}-{now.microsecond // 1000:03}"
    startup_s = _LEAST_STARTUP_S * 10
    if described.measured is not None:
        startup_s = min(max(round(_STARTS * described.measured.cold_start_s), _LEAST_STARTUP_S), _MOST_STARTUP_S)
    try:
        from .endpoint import creation, planned

        return planned(
            creation(
                name,
                sagemaker.model(
                    version,
                    described,
                    role=arguments.role,
                    model_data=arguments.model_data,
                    serverless=capacity.serverless,
                ),
                sagemaker.endpoint_config(version, capacity, startup_timeout_s=startup_s),
                update=arguments.update,
            )
        )
    except ModuleNotFoundError:
        raise MissingPackageError(
            'deploying to SageMaker needs an optional package: pip install "medusa-runtime[deploy]"'
        ) from None


def _capacity(arguments: argparse.Namespace) -> sagemaker.Capacity:
    """Serverless or real-time; ConfigError for a flag of the other."""
    given = {
        name: value
        for name in ("memory_mb", "max_concurrency", "provisioned_concurrency", "instance_count")
        if (value := getattr(arguments, name)) is not None
    }
    serverless = arguments.instance_type is None
    alien = [name for name in given if (name == "instance_count") is serverless]
    if alien:
        flags = ", ".join("--" + name.replace("_", "-") for name in alien)
        kind, other = ("serverless", "needs") if serverless else ("real-time", "goes without")
        raise ConfigError(f"{flags}: the endpoint would be {kind}; the flag {other} --instance-type")
    return sagemaker.Capacity(instance_type=arguments.instance_type, needs_gpu=arguments.gpu, **given)


def _delete(arguments: argparse.Namespace, name: str) -> int:
    if arguments.dry_run:
        calls = [{"operation": "DeleteEndpoint", "parameters": {"EndpointName": name}}]
        print(json.dumps(calls, indent=2))
        print("then its endpoint configuration and the model of the same name", file=sys.stderr)
        return 0
    _client(arguments).delete(name)
    return 0


def _client(arguments: argparse.Namespace) -> EndpointClient:
    from .endpoint import EndpointClient

    return EndpointClient(arguments.region, lambda line: print(line, flush=True), poll_s=arguments.poll_s)
