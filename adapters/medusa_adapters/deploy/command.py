"""`medusa deploy PLATFORM`: print what a platform needs to run a function or, with ``--apply``, deploy it."""

from __future__ import annotations

import argparse

from ..cli.subcommands import add_subcommands, run_subcommand

_PLATFORMS = (
    ("knative", "medusa_adapters.deploy.knative", "print a Knative Service, or apply it with kubectl"),
    ("openfaas", "medusa_adapters.deploy.openfaas", "print stack.yaml, or write what faas-cli needs, and bring it up"),
    ("sagemaker", "medusa_adapters.deploy.aws.sagemaker", "print the calls of a SageMaker endpoint, or make them"),
    ("kubernetes", "medusa_adapters.deploy.kubernetes", "print a Deployment that scales, or apply it with kubectl"),
    ("kserve", "medusa_adapters.deploy.kserve", "print a KServe ServingRuntime and InferenceService, or apply them"),
    ("helm", "medusa_adapters.deploy.helm", "print a Helm chart, or write it into a folder, and install it"),
    ("lambda", "medusa_adapters.deploy.aws.lambda_", "print the calls of a Lambda function, or make them"),
    ("cloudrun", "medusa_adapters.deploy.cloudrun", "print a Cloud Run service, or bring it there with gcloud"),
    ("cluster", "medusa_adapters.deploy.cluster", "print a KubeRay RayCluster with its gateways, or apply it"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_subcommands(parser, _PLATFORMS, metavar="platform")


def run(arguments: argparse.Namespace) -> int:
    return run_subcommand(arguments)
