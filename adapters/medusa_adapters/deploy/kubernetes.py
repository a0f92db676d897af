"""`medusa deploy kubernetes`: a Deployment, a Service and an autoscaler, printed or applied with kubectl."""

from __future__ import annotations

import argparse
import re

from medusa_runtime.errors import ConfigError

from . import agent
from .delivery import add_apply, print_or_apply
from .manifests import values
from .manifests.flags import add_list
from .manifests.function import Function, parse_function
from .manifests.kubernetes import deployment
from .manifests.kubernetes.pod import Placement
from .placement import add_arguments as add_pod_arguments
from .placement import parse_placement

_MOST_TIMEOUT_S = 12 * 3600
_HOST = re.compile(r"(\*\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared_arguments(parser)
    parser.add_argument(
        "--network-policy",
        action="store_true",
        help="render a NetworkPolicy, too: connections from this namespace alone",
    )
    agent.add_arguments(parser)
    add_apply(parser)


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that ``parse_deployment`` reads, which a Helm chart has, too."""
    add_pod_arguments(parser)
    parser.add_argument(
        "--autoscaler",
        choices=deployment.AUTOSCALERS,
        help="hpa: by CPU; keda: by requests, as Prometheus has them; keda-http: by requests, to zero; "
        "none: --min-scale instances (default: hpa with --cpu, else none)",
    )
    parser.add_argument("--prometheus", metavar="URL", help="with keda: the Prometheus that scrapes the instances")
    add_list(parser, "--host", "NAME", "with keda-http: a host name under which the function is called")


def run(arguments: argparse.Namespace) -> int:
    function, placed, scaling = parse_deployment(arguments, node_agent=agent.is_requested(arguments))
    shared = agent.plan_agent(arguments, placed, image=function.image, model=function.env.get("MEDUSA_MODEL"))
    documents = [*shared.manifests, *deployment.manifests(function, placed, scaling)]
    if arguments.network_policy:
        documents.append(deployment.network_policy_of(function, placed))
    return print_or_apply(
        documents,
        ["Made by `medusa deploy kubernetes`.", *comments(scaling)],
        agent=shared,
        namespace=placed.namespace,
        apply=arguments.apply,
    )


def parse_deployment(
    arguments: argparse.Namespace, *, node_agent: bool = False
) -> tuple[Function, Placement, deployment.Scaling]:
    """Return the validated values for the manifests. Raises ConfigError, which names the flag that cannot be used."""
    values.check_range(arguments.timeout, 1, _MOST_TIMEOUT_S, "--timeout-s", "seconds")
    placed = parse_placement(arguments, node_agent=node_agent)
    for host in arguments.host:
        if not _HOST.fullmatch(host):
            raise ConfigError(f"--host={host!r} cannot be used: expected a host name such as fn.example.com")
    scaling = deployment.Scaling(
        arguments.autoscaler or ("hpa" if arguments.cpu else "none"), arguments.prometheus, tuple(arguments.host)
    )
    deployment.check(scaling, placed)
    return parse_function(arguments, platform="local", timeout_s=arguments.timeout), placed, scaling


def comments(scaling: deployment.Scaling) -> list[str]:
    """Return what the autoscaler needs in the cluster."""
    return {
        "hpa": ["The HorizontalPodAutoscaler needs the cluster's metrics-server."],
        "keda": ["The ScaledObject needs KEDA (https://keda.sh), and Prometheus to scrape the instances' /metrics."],
        "keda-http": [
            "The HTTPScaledObject needs KEDA and its HTTP add-on; send requests to the add-on's interceptor "
            "(keda-add-ons-http-interceptor-proxy), which holds them while no instance runs."
        ],
        "none": ["The number of instances is fixed: no --autoscaler was chosen."],
    }[scaling.autoscaler]
