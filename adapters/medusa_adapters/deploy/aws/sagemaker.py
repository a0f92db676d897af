"""`medusa deploy sagemaker`: the calls that make, update or delete an endpoint, printed or made through boto3."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from medusa_runtime.errors import ConfigError

from ..manifests import sagemaker
from ..manifests.function import Function, parse_function
from ..manifests.function import add_arguments as add_function_arguments
from .calls import Calls, check_action, check_role, print_calls, print_line, tags, validated
from .calls import add_arguments as add_aws_arguments
from .endpoint import EndpointClient, creation

_LEAST_STARTUP_S, _MOST_STARTUP_S = 60, 3600
_UTILIZATION = 0.7
_STARTS = 10  # the health check waits for ten measured starts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_function_arguments(parser)
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
    scaling = parser.add_argument_group("autoscaling (real-time, or serverless with --provisioned-concurrency)")
    scaling.add_argument("--min-scale", type=int, help="fewest instances (1)")
    scaling.add_argument("--max-scale", type=int, help="most instances; given, the endpoint scales")
    add_aws_arguments(
        parser,
        updates="a new version behind the endpoint that is there",
        deletes="delete the endpoint, its configuration and its model",
        vpc="real-time: ",
        tags="of all that is made",
    )
    parser.add_argument("--no-wait", action="store_true", help="do not wait until it is in service")
    parser.add_argument("--dry-run", action="store_true", help=argparse.SUPPRESS)  # what happens without --apply now
    parser.add_argument("--poll-s", type=float, default=10.0, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    check_action(arguments)
    if arguments.dry_run and arguments.apply:
        raise ConfigError("--dry-run and --apply: expected one of them; without either, the calls are printed")
    if arguments.dry_run:
        print("medusa: --dry-run is what happens without --apply now; leave it out", file=sys.stderr)
    name = sagemaker.check_name(arguments.name)
    if arguments.delete:
        return _delete(arguments, name)
    made = plan(arguments, name)
    if not arguments.apply:
        print_calls([*made.calls, *made.scaling])
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
    client.create(made.calls)
    if found is not None:
        client.tag(found, made.tags)
    if arguments.no_wait:
        return 0
    client.wait(name, made.calls[-1][1]["EndpointConfigName"])
    client.scale(made.scaling)
    if found is not None:
        client.delete_config(found["EndpointConfigName"])
    return 0


class Plan(NamedTuple):
    """The calls of SageMaker, those of Application Auto Scaling that follow them, and the tags."""

    calls: Calls
    scaling: Calls
    tags: Mapping[str, str]


def plan(arguments: argparse.Namespace, name: str) -> Plan:
    """Return the calls, checked against the limits and against AWS' own models. Raises ConfigError."""
    capacity = _capacity(arguments)
    sagemaker.check(capacity, arguments.model_data)
    vpc = None
    if arguments.subnet or arguments.security_group:
        vpc = sagemaker.Vpc(arguments.subnet, arguments.security_group)
    sagemaker.check_network(capacity, vpc)
    given = tags(arguments.tag)
    check_role(arguments)
    function = parse_function(arguments, platform="sagemaker", timeout_s=sagemaker.TIMEOUT_S)
    now = datetime.now(UTC)
    version = f"{name}-{now:%Y%m%d-%H%M%S}-{now.microsecond // 1000:03}"
    startup_s = _LEAST_STARTUP_S * 10
    if function.measured is not None:
        startup_s = min(max(round(_STARTS * function.measured.cold_start_s), _LEAST_STARTUP_S), _MOST_STARTUP_S)
    scaling = _scaling(arguments, capacity, function)
    model = sagemaker.model(
        *(version, function),
        role=arguments.role,
        model_data=arguments.model_data,
        serverless=capacity.serverless,
        vpc=vpc,
        tags=given,
    )
    config = sagemaker.endpoint_config(version, capacity, startup_timeout_s=startup_s, tags=given)
    scalers: Calls = [] if scaling is None else [*sagemaker.autoscaling(name, capacity, scaling)]
    return Plan(
        validated(creation(name, model, config, update=arguments.update, tags=given), "sagemaker"),
        validated(scalers, "application-autoscaling"),
        given,
    )


def _scaling(
    arguments: argparse.Namespace, capacity: sagemaker.Capacity, function: Function
) -> sagemaker.Autoscaling | None:
    """Return between how many instances the endpoint scales; None without ``--max-scale``."""
    if arguments.max_scale is None:
        if arguments.min_scale is not None:
            raise ConfigError("--min-scale needs --max-scale: the endpoint scales between them")
        return None
    if arguments.no_wait:
        raise ConfigError("--max-scale and --no-wait: only an endpoint that is in service can scale; leave one out")
    cooldown_s = 300
    if function.measured is not None:
        cooldown_s = min(max(round(_STARTS * function.measured.answer_s), 60), 3600)
    scaling = sagemaker.Autoscaling(
        arguments.min_scale or 1,
        arguments.max_scale,
        _UTILIZATION if capacity.serverless else max(1.0, _UTILIZATION * function.concurrency),
        cooldown_s,
    )
    sagemaker.check_scaling(capacity, scaling)
    return scaling


def _capacity(arguments: argparse.Namespace) -> sagemaker.Capacity:
    """Return the capacity, serverless or real-time. Raises ConfigError for a flag that only the other kind has."""
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
    if not arguments.apply:
        print_calls([("DeleteEndpoint", {"EndpointName": name})])
        print("then its endpoint configuration and the model of the same name", file=sys.stderr)
        return 0
    _client(arguments).delete(name)
    return 0


def _client(arguments: argparse.Namespace) -> EndpointClient:
    return EndpointClient(arguments.region, print_line, poll_s=arguments.poll_s)
