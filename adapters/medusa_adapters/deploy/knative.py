"""`medusa deploy knative`: prints manifests, or applies them through kubectl."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any

from medusa_runtime.errors import ConfigError, DeployError

from .client import run_client
from .manifests import document, features, knative, node_agent, values
from .manifests.function import add_arguments as add_function_arguments
from .manifests.function import function
from .manifests.measured import Measured

_KUBECTL_TIMEOUT_S = 120
_MOST_INSTANCES = 10_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_function_arguments(parser)
    parser.add_argument("--namespace", default="default", help="default: %(default)s")
    parser.add_argument(
        "--timeout", type=int, default=300, help="seconds a request may take (60 to 600; default: %(default)s)"
    )
    parser.add_argument("--cpu", help="CPUs an instance asks for, e.g. 2 or 500m")
    parser.add_argument("--memory", help="memory an instance may take, e.g. 8Gi; the weights count")
    parser.add_argument("--gpu", type=int, default=0, metavar="COUNT", help="GPUs of an instance (nvidia.com/gpu)")
    parser.add_argument("--min-scale", type=int, default=0, help="instances that always run (default: none)")
    parser.add_argument("--max-scale", type=int, default=0, help="most instances; 0: no limit (default)")
    parser.add_argument("--node-selector", action="append", default=[], metavar="KEY=VALUE", help="may be repeated")
    parser.add_argument(
        "--toleration", action="append", default=[], metavar="KEY[=VALUE][:EFFECT]", help="may be repeated"
    )
    parser.add_argument("--runtime-class", help="e.g. nvidia")
    parser.add_argument("--service-account", help="default: none is mounted")
    parser.add_argument(
        "--secret", action="append", default=[], help="a Secret whose entries become variables, e.g. AWS keys"
    )
    parser.add_argument(
        "--network-policy",
        action="store_true",
        help="render a NetworkPolicy, too: connections from Knative, its gateways and this namespace alone",
    )
    parser.add_argument("--node-agent", action="store_true", help="share weights with the node agent; renders it, too")
    parser.add_argument("--node-agent-image", help="default: the function's image")
    parser.add_argument("--node-agent-memory", help="for regions and warm processes (16Gi)")
    parser.add_argument("--node-agent-cpu", help="for warm processes that serve (100m)")
    parser.add_argument("--node-agent-prewarm", metavar="ENGINE=N", help="idle engine processes a node, e.g. torch=2")
    parser.add_argument("--node-agent-secret", action="append", default=[], help="a Secret with what it fetches with")
    parser.add_argument("--apply", action="store_true", help="apply with kubectl instead of printing")


def run(arguments: argparse.Namespace) -> int:
    documents, comments = render(arguments)
    text = document.text(documents, comments)
    if not arguments.apply:
        sys.stdout.write(text)
        return 0
    _check_features(features.required(documents[-1]))
    if arguments.node_agent:
        _check_namespace(arguments.namespace)
    sys.stdout.write(_kubectl("apply", "-f", "-", stdin=text))
    return 0


def render(arguments: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """The manifests, the Service last, and what a reader must know. ConfigError names a flag that cannot be used."""
    values.within(arguments.timeout, knative.LEAST_TIMEOUT_S, knative.MOST_TIMEOUT_S, "--timeout", "seconds")
    values.within(arguments.gpu, 0, 64, "--gpu")
    for flag in ("min_scale", "max_scale"):
        values.within(getattr(arguments, flag), 0, _MOST_INSTANCES, "--" + flag.replace("_", "-"))
    if 0 < arguments.max_scale < arguments.min_scale:
        raise ConfigError(f"--min-scale={arguments.min_scale} is above --max-scale={arguments.max_scale}")
    described = function(arguments, platform="knative", timeout_s=arguments.timeout)
    placement = knative.Placement(
        namespace=values.label(arguments.namespace, "--namespace"),
        cpu=arguments.cpu,
        memory=arguments.memory,
        gpus=arguments.gpu,
        min_scale=arguments.min_scale,
        max_scale=arguments.max_scale,
        node_selector=values.pairs(arguments.node_selector, "--node-selector"),
        tolerations=[_toleration(text) for text in arguments.toleration],
        runtime_class=arguments.runtime_class,
        service_account=arguments.service_account,
        secrets=arguments.secret,
        node_agent=arguments.node_agent,
    )
    documents = []
    for flag in ("image", "memory", "cpu", "prewarm", "secret"):
        if getattr(arguments, f"node_agent_{flag}") and not placement.node_agent:
            raise ConfigError(f"--node-agent-{flag} needs --node-agent")
    if placement.node_agent:
        documents = node_agent.manifests(
            values.image(arguments.node_agent_image or described.image),
            memory=values.quantity(arguments.node_agent_memory or "16Gi", "--node-agent-memory"),
            cpu=values.quantity(arguments.node_agent_cpu or "100m", "--node-agent-cpu"),
            prewarm=_prewarm(arguments.node_agent_prewarm),
            secrets=[values.subdomain(name, "--node-agent-secret") for name in arguments.node_agent_secret],
            node_selector=placement.node_selector,
            tolerations=placement.tolerations,
        )
    rendered = knative.service(described, placement)
    if arguments.network_policy:
        documents.append(knative.network_policy_of(rendered))
    return [*documents, rendered], _comments(rendered, placement, described.measured)


def _comments(service: Mapping[str, Any], placement: knative.Placement, measured: Measured | None) -> list[str]:
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
    if placement.node_agent:
        enforce = "=".join(*node_agent.PRIVILEGED.items())
        lines.append(f"Needs, for the node agent's folder: kubectl label namespace {placement.namespace} {enforce}")
    return lines


def _prewarm(text: str | None) -> str | None:
    """ConfigError for what `medusa node` would refuse."""
    from medusa_runtime.node.settings import node_settings

    try:
        node_settings({}, {"prewarm": text})
    except ConfigError as error:
        raise ConfigError(str(error).replace("--prewarm", "--node-agent-prewarm")) from None
    return text


def _toleration(text: str) -> dict[str, str]:
    rest, _, effect = text.partition(":")
    key, sign, value = rest.partition("=")
    if not key:
        raise ConfigError(f"--toleration={text!r} cannot be used: expected KEY[=VALUE][:EFFECT]")
    values.pairs([f"{key}={value}"], "--toleration")
    toleration = {"key": key} | ({"operator": "Equal", "value": value} if sign else {"operator": "Exists"})
    return toleration | ({"effect": effect} if effect else {})


def _check_features(needed: Mapping[str, str]) -> None:
    if not needed:
        return
    found = json.loads(_kubectl("get", "configmap", "config-features", "-n", "knative-serving", "-o", "json"))
    data = found.get("data") or {}
    off = [flag for flag in needed if data.get(flag, "disabled").lower() not in ("enabled", "allowed")]
    if off:
        patch = json.dumps({"data": dict.fromkeys(off, "enabled")})
        raise DeployError(
            f"this cluster's Knative refuses {', '.join(needed[flag] for flag in off)}; turn it on with: "
            f"kubectl patch configmap config-features -n knative-serving --type merge -p '{patch}'"
        )


def _check_namespace(namespace: str) -> None:
    found = json.loads(_kubectl("get", "namespace", namespace, "-o", "json"))
    ((label, level),) = node_agent.PRIVILEGED.items()
    # Without the label the cluster's default holds, which need not be privileged but mostly is.
    present = (found["metadata"].get("labels") or {}).get(label, level)
    if present != level:
        raise DeployError(
            f"namespace {namespace} enforces Pod Security {present!r}, which refuses the node agent's hostPath; "
            f"change it with: kubectl label --overwrite namespace {namespace} {label}={level}"
        )


def _kubectl(*command: str, stdin: str | None = None) -> str:
    return run_client(["kubectl", *command], timeout_s=_KUBECTL_TIMEOUT_S, stdin=stdin)
