"""`medusa deploy knative|openfaas|sagemaker`: a function on a platform."""

from __future__ import annotations

import argparse
import importlib

_PLATFORMS = (
    ("knative", "medusa_adapters.deploy.knative", "print a Knative Service, or apply it with kubectl"),
    ("openfaas", "medusa_adapters.deploy.openfaas", "write stack.yaml and the template for faas-cli"),
    ("sagemaker", "medusa_adapters.deploy.sagemaker", "create, update or delete a SageMaker endpoint"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    platforms = parser.add_subparsers(metavar="platform", required=True)
    for name, module, text in _PLATFORMS:
        platform = platforms.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        platform.set_defaults(platform_module=module)
        importlib.import_module(module).add_arguments(platform)


def run(arguments: argparse.Namespace) -> int:
    status: int = importlib.import_module(arguments.platform_module).run(arguments)
    return status
