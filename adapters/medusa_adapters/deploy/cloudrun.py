"""`medusa deploy cloudrun`: a Cloud Run service, printed or brought there with gcloud."""

from __future__ import annotations

import argparse
import re
import sys
import tempfile

from medusa_runtime.errors import ConfigError

from .client import run_client
from .manifests import cloudrun, document, values
from .manifests.flags import add_labels, add_list, check_scale
from .manifests.function import add_arguments as add_function_arguments
from .manifests.function import add_timeout, parse_function
from .manifests.kubernetes import secret
from .placement import labels

_GCLOUD_TIMEOUT_S = 900
_MOST_INSTANCES = 1000
_REGION = re.compile(r"[a-z]+(-[a-z]+)+\d+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_function_arguments(parser)
    add_timeout(parser, bounds="1 to 3600")
    parser.add_argument("--region", help="e.g. europe-west1; --apply needs it")
    parser.add_argument("--project", help="default: as gcloud finds it")
    parser.add_argument("--cpu", default="1", help="CPUs of an instance: 1, 2, 4, 6 or 8 (default: %(default)s)")
    parser.add_argument("--memory", default="2Gi", help="512Mi to 32Gi; weights and /tmp count (default: %(default)s)")
    parser.add_argument("--gpu-type", metavar="TYPE", help="give each instance a GPU, e.g. nvidia-l4")
    parser.add_argument("--min-scale", type=int, default=0, help="instances that always run (default: none)")
    parser.add_argument("--max-scale", type=int, default=0, help="most instances; 0: the project's limit (default)")
    parser.add_argument("--service-account", metavar="EMAIL", help="whose rights the function has")
    add_list(parser, "--secret", "VARIABLE=SECRET/VERSION", "a secret of Secret Manager, e.g. HF_TOKEN=hub/latest")
    add_labels(parser)
    parser.add_argument("--apply", action="store_true", help="bring it there with gcloud instead of printing")


def run(arguments: argparse.Namespace) -> int:
    text = render(arguments)
    if not arguments.apply:
        sys.stdout.write(text)
        return 0
    if not arguments.region:
        raise ConfigError("--apply needs --region: where the service runs, e.g. europe-west1")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(text)
        file.flush()
        command = ["gcloud", "run", "services", "replace", file.name, f"--region={arguments.region}", "--quiet"]
        if arguments.project:
            command.append(f"--project={arguments.project}")
        sys.stdout.write(run_client(command, timeout_s=_GCLOUD_TIMEOUT_S))
    return 0


def render(arguments: argparse.Namespace) -> str:
    """Return the service as YAML. Raises ConfigError, which names the flag that cannot be used."""
    values.check_range(arguments.timeout, 1, cloudrun.MOST_TIMEOUT_S, "--timeout-s", "seconds")
    check_scale(arguments, _MOST_INSTANCES)
    if arguments.region and not _REGION.fullmatch(arguments.region):
        raise ConfigError(f"--region={arguments.region!r} cannot be used: expected a region such as europe-west1")
    function = parse_function(arguments, platform="knative", timeout_s=arguments.timeout)
    where = cloudrun.CloudRun(
        region=arguments.region,
        cpu=arguments.cpu,
        memory=arguments.memory,
        accelerator=arguments.gpu_type,
        min_scale=arguments.min_scale,
        max_scale=arguments.max_scale,
        service_account=arguments.service_account,
        secrets=[secret.parse_secret(text, "--secret") for text in arguments.secret],
        labels=labels(arguments),
        annotations=values.annotation_pairs(arguments.annotation),
    )
    comments = [
        "Made by `medusa deploy cloudrun`. Bring it there with: gcloud run services replace FILE --region REGION"
    ]
    return document.text([cloudrun.service(function, where)], comments)
