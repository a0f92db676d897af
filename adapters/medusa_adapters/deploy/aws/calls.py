"""Calls of AWS' services through boto3. They are checked against the services' own models before any is made."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from medusa_runtime.errors import ConfigError, DeployError, MissingPackageError

from ..manifests.flags import add_list
from ..manifests.service_model import check_call

Report = Callable[[str], None]
Calls = list[tuple[str, Mapping[str, Any]]]

_MISSING = 'deploying to AWS needs an optional package: pip install "medusa-runtime[deploy]"'


class Aws:
    """A session in one region. If AWS refuses a call, its reason becomes the text of a DeployError."""

    def __init__(self, region: str | None) -> None:
        try:
            import boto3  # 0.2 s
        except ModuleNotFoundError:
            raise MissingPackageError(_MISSING) from None
        from botocore.exceptions import BotoCoreError, ClientError

        self.failures: tuple[type[Exception], ...] = (BotoCoreError, ClientError)
        self._clients: dict[str, Any] = {}
        try:
            self._session = boto3.session.Session(region_name=region)
        except BotoCoreError as error:
            raise DeployError(f"AWS cannot be called: {error}") from None
        if not self._session.region_name:
            raise DeployError("AWS' region is missing: give --region or set AWS_DEFAULT_REGION")
        self.region = str(self._session.region_name)

    def client(self, service: str) -> Any:
        """Return boto3's client of a service."""
        if service not in self._clients:
            try:
                self._clients[service] = self._session.client(service)
            except self.failures as error:
                raise DeployError(f"AWS cannot be called: {error}") from None
        return self._clients[service]

    def call(self, service: str, operation: str, parameters: Mapping[str, Any]) -> Any:
        """Make one call. Raises DeployError, with AWS' reason, if it is refused."""
        method = "".join("_" + c.lower() if c.isupper() else c for c in operation).lstrip("_")
        try:
            return getattr(self.client(service), method)(**parameters)
        except self.failures as error:
            raise DeployError(f"{_NAMES.get(service, service)} refused {operation}: {error}") from error


_NAMES = {"sagemaker": "SageMaker", "application-autoscaling": "Application Auto Scaling", "lambda": "Lambda"}


def add_arguments(
    parser: argparse.ArgumentParser, *, updates: str, deletes: str, vpc: str = "", tags: str = ""
) -> None:
    """Add the flags of all services of AWS. ``updates`` … ``tags`` say in their help what is meant."""
    parser.add_argument("--role", metavar="ARN", help="execution role")
    add_list(parser, "--subnet", "ID", f"{vpc}of a VPC to join")
    add_list(parser, "--security-group", "ID", "with --subnet")
    add_list(parser, "--tag", "KEY=VALUE", tags)
    parser.add_argument("--region", help="default: as boto3 finds it")
    parser.add_argument("--update", action="store_true", help=updates)
    parser.add_argument("--delete", action="store_true", help=deletes)
    parser.add_argument("--apply", action="store_true", help="make the calls; without it they are only printed")


def check_action(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if both ``--update`` and ``--delete`` are given."""
    if arguments.update and arguments.delete:
        raise ConfigError("--update and --delete: expected one of them")


def check_role(arguments: argparse.Namespace) -> None:
    """Raise ConfigError if ``--role`` is missing."""
    if not arguments.role:
        raise ConfigError(
            "--role is missing: expected the ARN of the execution role, e.g. arn:aws:iam::123456789012:role/fn"
        )


def validated(calls: Calls, service: str) -> Calls:
    """Return the calls, each checked against the service's own model. Raises ConfigError."""
    try:
        for operation, parameters in calls:
            check_call(service, operation, parameters)
    except ModuleNotFoundError:
        raise MissingPackageError(_MISSING) from None
    return calls


def print_calls(calls: Calls) -> None:
    """Print the calls as JSON and, on stderr, that none of them was made."""
    print(json.dumps([{"operation": operation, "parameters": given} for operation, given in calls], indent=2))
    print("medusa: nothing was called; add --apply to make these calls", file=sys.stderr)


def tags(given: list[str]) -> dict[str, str]:
    """Return the tags given with ``--tag``. AWS' own model checks their form."""
    found = {}
    for text in given:
        key, sign, value = text.partition("=")
        if not sign or not key:
            raise ConfigError(f"--tag={text!r} cannot be used: expected KEY=VALUE")
        found[key] = value
    return found


def print_line(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)
