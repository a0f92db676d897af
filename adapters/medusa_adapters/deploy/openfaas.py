"""`medusa deploy openfaas`: stack.yaml, or with ``--out`` a folder with all that `faas-cli up` needs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from medusa_runtime.errors import ConfigError

from ..cli.project.template_folder import template_files, template_folder, write_files
from .client import run_client
from .manifests import document, openfaas, values
from .manifests.flags import add_labels, add_list
from .manifests.function import add_arguments as add_function_arguments
from .manifests.function import add_timeout, parse_function
from .placement import labels, pull_secrets

_MOST_TIMEOUT_S = 12 * 3600
_BUILD_TIMEOUT_S = 3600
_MOST_INSTANCES = 10_000
_LANGUAGE = "medusa"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_function_arguments(parser)
    parser.add_argument("--gateway", default="http://127.0.0.1:8080", help="default: %(default)s")
    parser.add_argument(
        "--lang",
        choices=(_LANGUAGE, "dockerfile"),
        default=_LANGUAGE,
        help="dockerfile: the folder has its own Dockerfile",
    )
    parser.add_argument("--folder", help="the function's folder (default: ./NAME)")
    add_timeout(parser)
    parser.add_argument("--cpu", help="CPUs an instance asks for, e.g. 2 or 500m")
    parser.add_argument("--memory", help="memory an instance may take, e.g. 8Gi; the weights count")
    parser.add_argument("--gpu-profile", help="name of the OpenFaaS Profile that gives a GPU")
    parser.add_argument("--min-scale", type=int, default=1, help="fewest instances (default: %(default)s)")
    parser.add_argument("--max-scale", type=int, default=20, help="most instances (default: %(default)s)")
    parser.add_argument("--scale-to-zero", action="store_true", help="go when idle (OpenFaaS Pro)")
    parser.add_argument("--namespace", help="the gateway's own if not given")
    add_list(parser, "--secret", None, "becomes a file in /var/openfaas/secrets")
    add_list(parser, "--pull-secret", "SECRET", "for the image's registry")
    add_labels(parser)
    parser.add_argument(
        "--base-image",
        help="what the function's image is built on (default: medusa-runtime, as docs/images.md names it)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="write stack.yaml, template/medusa and, where it is missing, the function's folder into this folder",
    )
    parser.add_argument("--force", action="store_true", help="with --out: replace files that are there")
    parser.add_argument("--apply", action="store_true", help="with --out: run `faas-cli up` there")


def run(arguments: argparse.Namespace) -> int:
    text = render(arguments)
    if arguments.out is None:
        if arguments.apply:
            raise ConfigError("--apply needs --out: the folder where stack.yaml and the function's folder are")
        sys.stdout.write(text)
        return 0
    files = {"stack.yaml": text.encode(), **_sources(arguments)}
    write_files(files, arguments.out, replace=arguments.force)
    if arguments.apply:
        command = ["faas-cli", "up", "-f", "stack.yaml"]
        sys.stdout.write(run_client(command, timeout_s=_BUILD_TIMEOUT_S, folder=arguments.out))
        return 0
    code = (arguments.out / _folder(arguments)).resolve()
    print(f"wrote {arguments.out / 'stack.yaml'}; the function is in {code}. Go on with:")
    print(f"  cd {arguments.out} && faas-cli up -f stack.yaml")
    return 0


def _folder(arguments: argparse.Namespace) -> str:
    """Return the function's folder, relative to stack.yaml."""
    return arguments.folder or f"./{arguments.name}"


def _sources(arguments: argparse.Namespace) -> dict[str, bytes]:
    """Return the files to write: the template and, if missing, the function's folder.

    Raises ConfigError for a folder that cannot be built.
    """
    folder = _folder(arguments)
    code = arguments.out / folder
    if arguments.lang == "dockerfile":
        if not (code / "Dockerfile").is_file():
            raise ConfigError(
                f"--lang dockerfile: expected {code / 'Dockerfile'}, found none; make the folder with: "
                f"medusa new {arguments.name} (in {arguments.out}), or leave --lang out"
            )
        return {}
    template = template_files(template_folder("openfaas", "template"))
    files = {f"template/{name}": data for name, data in template.items()}
    if not code.exists():
        own = f"{_LANGUAGE}/function/"
        files |= {f"{folder}/{name[len(own) :]}": data for name, data in template.items() if name.startswith(own)}
    elif not (code / "handler.py").is_file():
        raise ConfigError(
            f"{code}: expected handler.py in the function's folder, found none; name another with --folder"
        )
    return files


def render(arguments: argparse.Namespace) -> str:
    """Return stack.yaml. Raises ConfigError, which names the flag that cannot be used."""
    values.check_range(arguments.timeout, 1, _MOST_TIMEOUT_S, "--timeout-s", "seconds")
    values.check_range(arguments.min_scale, 1, _MOST_INSTANCES, "--min-scale")
    values.check_range(arguments.max_scale, arguments.min_scale, _MOST_INSTANCES, "--max-scale")
    if not arguments.gateway.startswith(("http://", "https://")):
        raise ConfigError(f"--gateway={arguments.gateway!r} cannot be used: expected http://… or https://…")
    function = parse_function(arguments, platform="openfaas", timeout_s=arguments.timeout)
    stack = openfaas.Stack(
        gateway=arguments.gateway,
        lang=arguments.lang,
        handler=_folder(arguments),
        namespace=arguments.namespace,
        cpu=arguments.cpu,
        memory=arguments.memory,
        min_scale=arguments.min_scale,
        max_scale=arguments.max_scale,
        scale_to_zero=arguments.scale_to_zero,
        profile=arguments.gpu_profile,
        secrets=[*arguments.secret, *pull_secrets(arguments)],
        labels=labels(arguments),
        annotations=values.annotation_pairs(arguments.annotation),
        base_image=None if arguments.base_image is None else values.image(arguments.base_image, "--base-image"),
    )
    comments = [
        "Made by `medusa deploy openfaas`.",
        "The gateway's own timeouts (gateway.readTimeout, writeTimeout, upstreamTimeout) must be at least "
        f"{arguments.timeout + 5}s.",
        "Instances do not share weights through a node agent: OpenFaaS gives functions no volumes.",
    ]
    if arguments.lang == _LANGUAGE:
        comments.append(
            f"The image is built on {arguments.base_image or 'medusa-runtime'} (build argument BASE_IMAGE), which "
            "must be there: --base-image names another."
        )
    if arguments.scale_to_zero:
        comments.append("Scaling to zero needs OpenFaaS Pro; the Community Edition keeps the instances.")
    return document.text([openfaas.stack_yaml(function, stack)], comments)
