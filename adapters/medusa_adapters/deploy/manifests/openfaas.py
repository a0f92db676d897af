"""A function as an entry of OpenFaaS' stack.yaml."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import values
from .function import Function

_SCALE = "com.openfaas.scale."
_LEAST_ZERO_S, _MOST_ZERO_S = 60, 3600
_STARTS = 10  # idle for as long as ten starts take, then gone; see scaling.py


@dataclass(frozen=True)
class Stack:
    """What stack.yaml says beyond the function itself."""

    gateway: str = "http://127.0.0.1:8080"
    lang: str = "medusa"
    handler: str = "./function"
    namespace: str | None = None
    cpu: str | None = None
    memory: str | None = None
    min_scale: int = 1
    max_scale: int = 20
    scale_to_zero: bool = False
    profile: str | None = None  # GPUs come only through a Profile
    secrets: Sequence[str] = ()  # also those of a registry, which the gateway recognizes by their type
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    base_image: str | None = None  # None: as the template's Dockerfile has it


def stack_yaml(function: Function, stack: Stack) -> dict[str, Any]:
    """Return stack.yaml as plain values."""
    return {
        "version": 1.0,
        "provider": {"name": "openfaas", "gateway": stack.gateway},
        "functions": {function.name: _entry(function, stack)},
    }


def _entry(function: Function, stack: Stack) -> dict[str, Any]:
    timeout = f"{function.timeout_s}s"
    environment = {
        # of-watchdog's own variables, which the adapter honours. Reading and writing end a little after the work.
        "exec_timeout": timeout,
        "read_timeout": f"{function.timeout_s + 5}s",
        "write_timeout": f"{function.timeout_s + 5}s",
        "healthcheck_interval": "5s",
        "max_inflight": str(function.concurrency),
    } | dict(function.env)
    entry: dict[str, Any] = {
        "lang": stack.lang,
        "handler": stack.handler,
        "image": function.image,
        "environment": environment,
        "labels": {**_labels(function, stack), **stack.labels},
        "annotations": {
            **stack.annotations,
            "com.openfaas.health.http.path": "/_/health",
            "com.openfaas.ready.http.path": "/_/ready",
        },
        "readonly_root_filesystem": True,
    }
    if stack.profile:
        entry["annotations"]["com.openfaas.profile"] = values.subdomain(stack.profile, "--gpu-profile")
    if stack.namespace:
        entry["namespace"] = values.namespace(stack.namespace)
    if stack.secrets:
        entry["secrets"] = [values.subdomain(secret, "--secret") for secret in stack.secrets]
    if stack.base_image:
        entry["build_args"] = {"BASE_IMAGE": stack.base_image}
    resources = {
        key: checked(value, f"--{key}")
        for key, value, checked in (("memory", stack.memory, values.memory), ("cpu", stack.cpu, values.quantity))
        if value
    }
    if resources:
        entry["requests"] = dict(resources)
    if stack.memory:
        entry["limits"] = {"memory": stack.memory}
    return entry


def _labels(function: Function, stack: Stack) -> dict[str, str]:
    """Return the labels, as text. Most need OpenFaaS Pro; the Community Edition ignores those."""
    labels = {
        _SCALE + "min": str(stack.min_scale),
        _SCALE + "max": str(stack.max_scale),
        _SCALE + "type": "capacity",
        _SCALE + "target": str(function.concurrency),
        _SCALE + "target-proportion": "0.7",
        _SCALE + "zero": str(stack.scale_to_zero).lower(),
    }
    if function.measured is not None:
        idle_s = math.ceil(_STARTS * function.measured.answer_s)
        labels[_SCALE + "zero-duration"] = f"{min(max(idle_s, _LEAST_ZERO_S), _MOST_ZERO_S)}s"
        proportion = min(max(0.85 - 0.03 * function.measured.answer_s, 0.5), 0.85)
        labels[_SCALE + "target-proportion"] = f"{proportion:.2f}"
    return labels
