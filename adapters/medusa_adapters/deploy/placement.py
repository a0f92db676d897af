"""The flags that say where and how a function runs on Kubernetes, whatever serves it there."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from medusa_runtime.errors import ConfigError

from .manifests import values
from .manifests.flags import add_labels, add_list, check_scale
from .manifests.function import add_arguments as add_function_arguments
from .manifests.function import add_timeout
from .manifests.kubernetes import secret
from .manifests.kubernetes.pod import Placement

_MOST_INSTANCES = 10_000
_MOST_GPUS = 64
_OWN_LABELS = ("app.kubernetes.io/name", "app.kubernetes.io/managed-by")


def add_arguments(parser: argparse.ArgumentParser, timeouts: str = "") -> None:
    """Add the flags that ``parse_function`` and ``parse_placement`` read, and the time limit, within ``timeouts``."""
    add_function_arguments(parser)
    add_timeout(parser, bounds=timeouts)
    parser.add_argument("--namespace", default="default", help="default: %(default)s")
    parser.add_argument("--cpu", help="CPUs an instance asks for, e.g. 2 or 500m")
    parser.add_argument("--memory", help="memory an instance may take, e.g. 8Gi; the weights count")
    parser.add_argument("--gpu", type=int, default=0, metavar="COUNT", help="GPUs of an instance (nvidia.com/gpu)")
    parser.add_argument("--min-scale", type=int, default=0, help="instances that always run (default: none)")
    parser.add_argument("--max-scale", type=int, default=0, help="most instances; 0: no limit (default)")
    parser.add_argument("--service-account", help="default: none is mounted")
    add_list(
        parser,
        "--secret",
        "SECRET|VARIABLE=SECRET/KEY",
        "a Secret whose entries become variables, e.g. AWS keys, or one entry under a name",
    )
    add_node_arguments(parser)


def add_node_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``parse_placement`` that say which nodes may have pods, and what pods are marked with."""
    add_list(parser, "--node-selector", "KEY=VALUE")
    add_list(parser, "--toleration", "KEY[=VALUE][:EFFECT]")
    parser.add_argument("--runtime-class", help="e.g. nvidia")
    add_list(parser, "--pull-secret", "SECRET", "for the image's registry")
    add_labels(parser)


def parse_placement(arguments: argparse.Namespace, *, node_agent: bool = False) -> Placement:
    """Return the checked placement. Raises ConfigError, which names the flag that cannot be used."""
    values.check_range(arguments.gpu, 0, _MOST_GPUS, "--gpu")
    check_scale(arguments, _MOST_INSTANCES)
    return Placement(
        namespace=values.namespace(arguments.namespace),
        cpu=arguments.cpu,
        memory=arguments.memory,
        gpus=arguments.gpu,
        min_scale=arguments.min_scale,
        max_scale=arguments.max_scale,
        node_selector=values.pairs(arguments.node_selector, "--node-selector"),
        tolerations=[_toleration(text) for text in arguments.toleration],
        runtime_class=arguments.runtime_class,
        service_account=arguments.service_account,
        secrets=[secret.parse_secret(text, "--secret") for text in arguments.secret],
        pull_secrets=pull_secrets(arguments),
        labels=labels(arguments),
        annotations=values.annotation_pairs(arguments.annotation),
        node_agent=node_agent,
    )


def labels(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the labels given with ``--label``, checked."""
    found = values.pairs(arguments.label, "--label")
    if ours := [key for key in found if key in _OWN_LABELS]:
        raise ConfigError(f"--label {', '.join(ours)}: set by medusa itself; expected another label")
    return found


def pull_secrets(arguments: argparse.Namespace) -> Sequence[str]:
    """Return the names given with ``--pull-secret``, checked."""
    return [values.subdomain(name, "--pull-secret") for name in arguments.pull_secret]


def _toleration(text: str) -> dict[str, str]:
    rest, _, effect = text.partition(":")
    key, sign, value = rest.partition("=")
    if not key:
        raise ConfigError(f"--toleration={text!r} cannot be used: expected KEY[=VALUE][:EFFECT]")
    values.pairs([f"{key}={value}"], "--toleration")
    toleration = {"key": key} | ({"operator": "Equal", "value": value} if sign else {"operator": "Exists"})
    if effect not in ("", "NoSchedule", "PreferNoSchedule", "NoExecute"):
        raise ConfigError(
            f"--toleration={text!r} cannot be used: expected the effect NoSchedule, PreferNoSchedule or NoExecute"
        )
    return toleration | ({"effect": effect} if effect else {})
