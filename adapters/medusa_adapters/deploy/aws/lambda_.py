"""`medusa deploy lambda`: the calls that make, update or delete a Lambda function, printed or made through boto3."""

from __future__ import annotations

import argparse

from medusa_runtime.errors import ConfigError, DeployError

from ..manifests import lambda_, values
from ..manifests.function import add_arguments as add_function_arguments
from ..manifests.function import add_timeout, parse_function
from .calls import Aws, Calls, check_action, check_role, print_calls, print_line, tags, validated
from .calls import add_arguments as add_aws_arguments

_CREATED, _UPDATED = "function_active_v2", "function_updated_v2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_function_arguments(parser)
    add_timeout(parser, 60, bounds="1 to 900")
    parser.add_argument("--memory-mb", type=int, default=2048, help="128 to 10240; CPUs follow it; the weights count")
    parser.add_argument("--storage-mb", type=int, default=512, help="size of /tmp, 512 to 10240")
    parser.add_argument("--architecture", choices=lambda_.ARCHITECTURES, default="x86_64", help="the image's")
    parser.add_argument(
        "--url", choices=("iam", "public"), help="give it a function URL, for callers with AWS' signature or for all"
    )
    add_aws_arguments(parser, updates="give the function that is there this version", deletes="delete the function")


def run(arguments: argparse.Namespace) -> int:
    check_action(arguments)
    calls = plan(arguments)
    if not arguments.apply:
        print_calls(calls)
        return 0
    aws = Aws(arguments.region)
    made: Calls = []
    try:
        for operation, parameters in calls:
            aws.call("lambda", operation, parameters)
            made.append((operation, parameters))
            print_line(f"{operation} {parameters['FunctionName']}")
            _wait(aws, operation, arguments.name)
    except DeployError:
        if made and made[0][0] == "CreateFunction":
            aws.call("lambda", "DeleteFunction", {"FunctionName": arguments.name})
            print_line(f"DeleteFunction {arguments.name}")
        raise
    if arguments.url and not arguments.update and not arguments.delete:
        print_line(aws.call("lambda", "GetFunctionUrlConfig", {"FunctionName": arguments.name})["FunctionUrl"])
    return 0


def plan(arguments: argparse.Namespace) -> Calls:
    """Return the calls, checked against the limits and against Lambda's own model. Raises ConfigError."""
    if arguments.delete:
        return validated([("DeleteFunction", {"FunctionName": values.name(arguments.name)})], "lambda")
    values.check_range(arguments.timeout, 1, lambda_.MOST_TIMEOUT_S, "--timeout-s", "seconds")
    check_role(arguments)
    if arguments.update and (arguments.url or arguments.tag):
        raise ConfigError("--url and --tag: expected without --update; they stay as they were made")
    capacity = lambda_.Capacity(
        role=arguments.role,
        memory_mb=arguments.memory_mb,
        storage_mb=arguments.storage_mb,
        architecture=arguments.architecture,
        subnets=arguments.subnet,
        security_groups=arguments.security_group,
        tags=tags(arguments.tag),
        url=None if arguments.url is None else {"iam": "AWS_IAM", "public": "NONE"}[arguments.url],
    )
    lambda_.check(capacity)
    function = parse_function(arguments, platform="lambda", timeout_s=arguments.timeout)
    make = lambda_.update if arguments.update else lambda_.creation
    return validated([*make(function, capacity)], "lambda")


def _wait(aws: Aws, operation: str, name: str) -> None:
    """Wait until Lambda has finished a call: until then, it refuses other calls for the function."""
    waiter = {"CreateFunction": _CREATED}.get(operation, _UPDATED if operation.startswith("UpdateFunction") else None)
    if waiter is None:
        return
    from botocore.exceptions import WaiterError

    try:
        aws.client("lambda").get_waiter(waiter).wait(FunctionName=name)
    except WaiterError as error:
        raise DeployError(f"Lambda did not bring {name} up: {error}") from None
