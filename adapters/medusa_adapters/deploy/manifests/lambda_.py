"""A function as an AWS Lambda function of a container image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_runtime.errors import ConfigError

from . import values
from .function import Function

MOST_TIMEOUT_S = 900
ARCHITECTURES = ("x86_64", "arm64")
_LEAST_MEMORY_MB, _MOST_MEMORY_MB = 128, 10240
_LEAST_STORAGE_MB = 512
_ENTRY_POINT = ["python", "-m", "medusa_adapters.platforms.lambda_"]
_URL = "medusa-function-url"


@dataclass(frozen=True)
class Capacity:
    """The resources and the network of an instance. ``url`` is how a function URL authorizes callers, or None."""

    role: str
    memory_mb: int = 2048
    storage_mb: int = 512
    architecture: str = "x86_64"
    subnets: Sequence[str] = ()
    security_groups: Sequence[str] = ()
    tags: Mapping[str, str] = field(default_factory=dict)
    url: str | None = None


def check(capacity: Capacity) -> None:
    """Raise ConfigError for values that Lambda refuses. It names the flag."""
    values.check_range(capacity.memory_mb, _LEAST_MEMORY_MB, _MOST_MEMORY_MB, "--memory-mb")
    values.check_range(capacity.storage_mb, _LEAST_STORAGE_MB, _MOST_MEMORY_MB, "--storage-mb")
    if bool(capacity.subnets) is not bool(capacity.security_groups):
        raise ConfigError("--subnet and --security-group: expected both of them or neither")


def configuration(function: Function, capacity: Capacity) -> dict[str, Any]:
    """Return the parameters that CreateFunction and UpdateFunctionConfiguration share."""
    # An instance is given one event at a time.
    environment = {**function.env, "MEDUSA_MAX_CONCURRENCY": "1"}
    found: dict[str, Any] = {
        "FunctionName": function.name,
        "Role": capacity.role,
        "Timeout": function.timeout_s,
        "MemorySize": capacity.memory_mb,
        "EphemeralStorage": {"Size": capacity.storage_mb},
        "Environment": {"Variables": environment},
        "ImageConfig": {"EntryPoint": _ENTRY_POINT, "Command": []},
    }
    if capacity.subnets:
        found["VpcConfig"] = {
            "SubnetIds": list(capacity.subnets),
            "SecurityGroupIds": list(capacity.security_groups),
        }
    return found


def creation(function: Function, capacity: Capacity) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls that create a function."""
    tags = {"Tags": dict(capacity.tags)} if capacity.tags else {}
    image = {"PackageType": "Image", "Code": {"ImageUri": function.image}, "Architectures": [capacity.architecture]}
    return [("CreateFunction", {**configuration(function, capacity), **image, **tags}), *_url(function.name, capacity)]


def update(function: Function, capacity: Capacity) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls that update a function. Before each, Lambda must have finished the one before it."""
    code = {"FunctionName": function.name, "ImageUri": function.image, "Architectures": [capacity.architecture]}
    return [
        ("UpdateFunctionConfiguration", configuration(function, capacity)),
        ("UpdateFunctionCode", code),
    ]


def _url(name: str, capacity: Capacity) -> list[tuple[str, dict[str, Any]]]:
    """Return the calls for a function URL. Without authorization, anyone may call it."""
    if capacity.url is None:
        return []
    calls: list[tuple[str, dict[str, Any]]] = [
        ("CreateFunctionUrlConfig", {"FunctionName": name, "AuthType": capacity.url})
    ]
    if capacity.url == "NONE":
        everyone = {"FunctionName": name, "Principal": "*"}
        by_url = {"Action": "lambda:InvokeFunctionUrl", "FunctionUrlAuthType": "NONE"}
        calls.append(("AddPermission", {**everyone, **by_url, "StatementId": _URL}))
        # Since October 2025 a URL's caller needs this, too.
        invoke = {"Action": "lambda:InvokeFunction", "InvokedViaFunctionUrl": True}
        calls.append(("AddPermission", {**everyone, **invoke, "StatementId": f"{_URL}-invoke"}))
    return calls
