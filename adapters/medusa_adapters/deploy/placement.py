"""The flags that say where and how a function runs on Kubernetes, whatever serves it there."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from medusa_runtime.errors import ConfigError

from .manifests import values
from .manifests.function import add_arguments as add_function_arguments
from .manifests.function import add_timeout
from .manifests.kubernetes import secret
from .manifests.kubernetes.pod import Placement

_MOST_INSTANCES = 10_000
_MOST_GPUS = 64
_OWN_LABELS = ("app.kubernetes.io/name", "app.kubernetes.io/managed-by")


def add_arguments(parser: argparse.ArgumentParser, timeouts: str = "") -> None:
    """Add the flags of ``function``, the time limit (``timeouts``: what it may be) and those of ``placement``."""
    add_function_arguments(parser)
    add_timeout(parser, bounds=timeouts)
    parser.add_argument("--namespace", default="default", help="default: %(default)s")
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
        "--secret",
        action="append",
        default=[],
        metavar="SECRET|VARIABLE=SECRET/KEY",
        help="a Secret whose entries become variables, e.g. AWS keys, or one entry under a name; may be repeated",
    )
    parser.add_argument(
        "--pull-secret", action="append", default=[], metavar="SECRET", help="for the image's registry; may be repeated"
    )
    add_label_arguments(parser)


def add_label_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--label`` and ``--annotation``."""
    for name in ("label", "annotation"):
        parser.add_argument(f"--{name}", action="append", default=[], metavar="KEY=VALUE", help="may be repeated")


def placement(arguments: argparse.Namespace, *, node_agent: bool = False) -> Placement:
    """The checked placement. ConfigError names the flag that cannot be used."""
    values.within(arguments.gpu, 0, _MOST_GPUS, "--gpu")
    for flag in ("min_scale", "max_scale"):
        values.within(getattr(arguments, flag), 0, _MOST_INSTANCES, "--" + flag.replace("_", "-"))
    if 0 < arguments.max_scale < arguments.min_scale:
        raise ConfigError(f"--min-scale={arguments.min_scale} is above --max-scale={arguments.max_scale}")
    return Placement(
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
        secrets=[secret.secret(text, "--secret") for text in arguments.secret],
        pull_secrets=pull_secrets(arguments),
        labels=labels(arguments),
        annotations=values.annotation_pairs(arguments.annotation),
        node_agent=node_agent,
    )


def labels(arguments: argparse.Namespace) -> dict[str, str]:
    """The labels given with ``--label``, checked."""
    found = values.pairs(arguments.label, "--label")
    if ours := [key for key in found if key in _OWN_LABELS]:
        raise ConfigError(f"--label {', '.join(ours)}: set by medusa itself; expected another label")
    return found


def pull_secrets(arguments: argparse.Namespace) -> Sequence[str]:
    """The names given with ``--pull-secret``, checked."""
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
