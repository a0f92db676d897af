"""`medusa deploy knative`: prints manifests, or applies them through kubectl."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from typing import Any

from medusa_runtime.errors import DeployError

from . import agent
from .client import kubectl
from .delivery import add_apply, print_or_apply
from .manifests import values
from .manifests.function import parse_function
from .manifests.kubernetes import features, knative
from .manifests.measured import MeasuredStart
from .placement import add_arguments as add_pod_arguments
from .placement import parse_placement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pod_arguments(parser, "60 to 600")
    parser.add_argument(
        "--network-policy",
        action="store_true",
        help="render a NetworkPolicy, too: connections from Knative, its gateways and this namespace alone",
    )
    agent.add_arguments(parser)
    add_apply(parser)


def run(arguments: argparse.Namespace) -> int:
    values.check_range(arguments.timeout, knative.LEAST_TIMEOUT_S, knative.MOST_TIMEOUT_S, "--timeout-s", "seconds")
    placed = parse_placement(arguments, node_agent=agent.is_requested(arguments))
    function = parse_function(arguments, platform="knative", timeout_s=arguments.timeout)
    shared = agent.plan_agent(arguments, placed, image=function.image, model=function.env.get("MEDUSA_MODEL"))
    rendered = knative.service(function, placed)
    policy = [knative.network_policy_of(rendered)] if arguments.network_policy else []
    if arguments.apply:
        _check_features(features.required(rendered))
    return print_or_apply(
        [*shared.manifests, *policy, rendered],
        _comments(rendered, function.measured),
        agent=shared,
        namespace=placed.namespace,
        apply=arguments.apply,
    )


def _comments(service: Mapping[str, Any], measured: MeasuredStart | None) -> list[str]:
    lines = ["Made by `medusa deploy knative`."]
    if measured is None:
        lines.append("No --timeline was given: scaling is as Knative's defaults have it.")
    else:
        token = "none measured" if measured.ttft_s is None else f"{measured.ttft_s:.2f} s"
        lines.append(
            f"Scaling follows a measured start: ready after {measured.cold_start_s:.2f} s, first token {token}."
        )
    flags = features.required(service)
    if flags:
        lines.append("Needs in ConfigMap config-features of namespace knative-serving:")
        lines += [f"  {flag}: enabled    (for {field})" for flag, field in flags.items()]
    else:
        lines.append("Needs no feature flag of Knative.")
    return lines


def _check_features(needed: Mapping[str, str]) -> None:
    if not needed:
        return
    found = json.loads(kubectl("get", "configmap", "config-features", "-n", "knative-serving", "-o", "json"))
    data = found.get("data") or {}
    off = [flag for flag in needed if data.get(flag, "disabled").lower() not in ("enabled", "allowed")]
    if off:
        patch = json.dumps({"data": dict.fromkeys(off, "enabled")})
        raise DeployError(
            f"this cluster's Knative refuses {', '.join(needed[flag] for flag in off)}; turn it on with: "
            f"kubectl patch configmap config-features -n knative-serving --type merge -p '{patch}'"
        )
