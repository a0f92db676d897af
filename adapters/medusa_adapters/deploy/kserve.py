"""`medusa deploy kserve`: a ServingRuntime and an InferenceService, printed or applied with kubectl."""

from __future__ import annotations

import argparse

from . import agent
from .delivery import add_apply, print_or_apply
from .manifests import values
from .manifests.function import parse_function
from .manifests.kubernetes import knative, kserve
from .placement import add_arguments as add_pod_arguments
from .placement import parse_placement


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_pod_arguments(parser, "60 to 600")
    parser.add_argument(
        "--mode",
        choices=tuple(kserve.MODES),
        default="knative",
        help="what KServe runs it on: Knative, which scales to zero, or a Deployment (default: %(default)s)",
    )
    add_apply(parser)


def run(arguments: argparse.Namespace) -> int:
    values.check_range(arguments.timeout, knative.LEAST_TIMEOUT_S, knative.MOST_TIMEOUT_S, "--timeout-s", "seconds")
    placed = parse_placement(arguments)
    function = parse_function(arguments, platform="kserve", timeout_s=arguments.timeout)
    return print_or_apply(
        kserve.manifests(function, placed, mode=arguments.mode),
        ["Made by `medusa deploy kserve`.", "The instance fetches the model itself, so there is no storageUri."],
        agent=agent.AgentDeployment(),
        namespace=placed.namespace,
        apply=arguments.apply,
    )
