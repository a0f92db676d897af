"""`medusa cluster deploy`: make a model known to the cluster under a name."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from medusa_runtime.errors import ClusterError, ConfigError, NoControllerError
from medusa_runtime.node.regions.model_key import absolute
from medusa_runtime.registry import is_remote, offered_engines
from medusa_runtime.storage.base import scheme_of

from .connection import add_connection, ask

_WAIT_S, _MOST_WAIT_S = 600.0, 7 * 24 * 3600.0
_LOOK_S = 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the name for requests; one that is known is changed")
    parser.add_argument("--model", required=True, metavar="URL", help="checkpoint: a URL, or a path on every node")
    parser.add_argument("--engine", default="torch", metavar="NAME", help=f"one of {', '.join(_engines())}")
    parser.add_argument("--min", type=int, default=0, metavar="N", help="instances that always run (default: 0)")
    parser.add_argument("--max", type=int, metavar="N", help="instances at most (default: 1, or N of --min)")
    parser.add_argument("--ttft-slo", type=float, metavar="S", help="seconds to the first token that are wanted")
    parser.add_argument("--tpot-slo", type=float, metavar="S", help="seconds from token to token that are wanted")
    parser.add_argument("--device-kind", default="", metavar="NAME", help="start only on nodes of this --device-kind")
    parser.add_argument(
        "--weight", type=float, default=1.0, metavar="W", help="of its share when the cluster is full (default: 1)"
    )
    parser.add_argument(
        "--live-scaling",
        action="store_true",
        help="under load, a new instance helps a running one while its own layers arrive; "
        "with --ttft-slo only where first tokens might else be late",
    )
    parser.add_argument(
        "--disaggregated",
        action="store_true",
        help="prefill and decode on instances of their own; --min and --max count each of the two",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="an option of medusa serve for the instances, such as max-concurrency=16; may be repeated",
    )
    parser.add_argument(
        "--wait", type=float, nargs="?", const=_WAIT_S, metavar="S",
        help="end when --min instances of this deployment can answer and those of an earlier one are replaced; after S "
        f"seconds ({_WAIT_S:g}) with an error, while the cluster goes on",
    )  # fmt: skip
    add_connection(parser)


def run(arguments: argparse.Namespace) -> int:
    from medusa_cluster.deployment import Deployment

    if arguments.wait is not None and not 0 < arguments.wait <= _MOST_WAIT_S:
        raise ConfigError(f"--wait={arguments.wait:g}: expected seconds above 0, at most {_MOST_WAIT_S:g}")
    if not arguments.model:  # as a path it would be the current folder
        raise ConfigError("--model: expected a URL, or a checkpoint's folder that is there on every node, found ''")
    url = absolute(arguments.model)
    if not scheme_of(url) and arguments.address is None and not os.path.exists(url):  # this machine is a node
        raise ConfigError(
            f"--model: expected a URL, or a checkpoint's folder that is there on every node; {url} is not there"
        )
    if arguments.engine not in _engines():
        raise ConfigError(f"--engine: expected one of {', '.join(_engines())}, found {arguments.engine!r}")
    values = {
        "name": arguments.name,
        "url": url,
        "engine": arguments.engine,
        "min": arguments.min,
        "max": max(arguments.min, 1) if arguments.max is None else arguments.max,
        "ttft_slo_s": arguments.ttft_slo,
        "tpot_slo_s": arguments.tpot_slo,
        "live_scaling": arguments.live_scaling,
        "disaggregated": arguments.disaggregated,
        "device_kind": arguments.device_kind,
        "weight": arguments.weight,
        "settings": dict(map(_setting, arguments.set)),
    }
    deployment = Deployment.from_json(values, settings_name="--set")
    found = ask(arguments, "deploy", deployment.to_json())
    scale = f"{found['min']} to {found['max']} instances"
    print(f"deployed {found['name']}: {found['url']}, {scale}, revision {found['revision']}", flush=True)
    if arguments.wait is not None:
        _wait(arguments, found)
    return 0


def _wait(arguments: argparse.Namespace, deployed: dict[str, Any]) -> None:
    """Wait until a deployment serves alone. Raises ClusterError if it does not in time, or is not the newest one."""
    name, began, text = deployed["name"], time.monotonic(), ""
    while True:
        try:
            status = ask(arguments, "status", {})
        except NoControllerError as error:
            text = str(error)
        else:
            model = next((one for one in status["models"] if one["name"] == name), None)
            if model is None or model["revision"] != deployed["revision"]:
                raise ClusterError(f"{name} was {'removed' if model is None else 'deployed again'} meanwhile")
            old = sum(_serves_on(item, name) for node in status["nodes"] for item in node["instances"])
            ready = model["answering"]
            if not old and ready >= model["min"]:
                print(f"{ready} instance{'s' * (ready != 1)} can answer, after {time.monotonic() - began:.1f} s")
                return
            text = f"{ready} of {model['min']} can answer, and {old} of an earlier deployment"
            text += f"; the last try failed: {model['failure']}" if model["failure"] else ""
        if time.monotonic() - began > arguments.wait:
            raise ClusterError(f"{name} is not ready after {arguments.wait:g} s: {text}. The cluster goes on trying")
        time.sleep(_LOOK_S)


def _serves_on(instance: dict[str, Any], name: str) -> bool:
    """Return whether an instance of a model's earlier deployment takes requests."""
    return bool(instance["model"] == name and instance["outdated"] and instance["state"] == "ready")


def _engines() -> tuple[str, ...]:
    """Return the names of the engines that run the model on the cluster's nodes."""
    return tuple(name for name in offered_engines() if not is_remote(name))


def _setting(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign:
        raise ConfigError(f"--set: expected OPTION=VALUE such as max-concurrency=16, found {text!r}")
    return name.replace("-", "_"), value
