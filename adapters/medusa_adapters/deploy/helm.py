"""`medusa deploy helm`: a Helm chart of what `medusa deploy kubernetes` renders."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from medusa_runtime.errors import ConfigError

from ..cli.project.template_folder import write_files
from .client import run_client
from .kubernetes import add_shared_arguments, comments, parse_deployment
from .manifests.kubernetes import helm

_HELM_TIMEOUT_S = 600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_shared_arguments(parser)
    parser.add_argument("--out", type=Path, help="write the chart into this folder instead of printing it")
    parser.add_argument("--force", action="store_true", help="with --out: replace files that are there")
    parser.add_argument("--apply", action="store_true", help="with --out: run `helm upgrade --install` on it")


def run(arguments: argparse.Namespace) -> int:
    function, placed, scaling = parse_deployment(arguments)
    chart = helm.chart(
        function.name,
        replace(function, name=helm.RELEASE),
        replace(placed, namespace=helm.NAMESPACE),
        scaling,
        ["Made by `medusa deploy helm`.", *comments(scaling)],
    )
    if arguments.out is None:
        if arguments.apply:
            raise ConfigError("--apply needs --out: the folder where the chart is written")
        sys.stdout.write("".join(f"# File: {path}\n{text}---\n" for path, text in chart.items()))
        return 0
    write_files({path: text.encode() for path, text in chart.items()}, arguments.out, replace=arguments.force)
    command = ["helm", "upgrade", "--install", arguments.name, str(arguments.out), f"--namespace={placed.namespace}"]
    if arguments.apply:
        sys.stdout.write(run_client(command, timeout_s=_HELM_TIMEOUT_S))
    else:
        print(f"wrote the chart {arguments.out}; install it with: {' '.join(command)}")
    return 0
