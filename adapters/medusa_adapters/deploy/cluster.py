"""`medusa deploy cluster`: a KubeRay RayCluster of our nodes with its gateways, printed or applied with kubectl."""

from __future__ import annotations

import argparse
import dataclasses
import secrets

from medusa_runtime.config import LOG_FORMATS
from medusa_runtime.errors import ConfigError

from . import agent
from .client import kubectl
from .delivery import add_apply, print_or_apply
from .manifests import values
from .manifests.flags import add_list
from .manifests.kubernetes import node_agent, raycluster
from .manifests.kubernetes.raycluster import RayCluster
from .placement import add_node_arguments, parse_placement

_MOST_NODES = 10_000
_MOST_GATEWAYS = 100
# KubeRay and we append to it for the names of further objects, which are limited.
_LONGEST_NAME = 45
_PLACEMENT_DEFAULTS = {"min_scale": 0, "max_scale": 0, "service_account": None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the cluster's name")
    parser.add_argument("--image", help="an image with the extra `cluster`, e.g. medusa-runtime:cluster")
    parser.add_argument("--namespace", default="default", help="default: %(default)s")
    parser.add_argument("--nodes", type=int, default=3, help="nodes that always run, the head among them")
    parser.add_argument(
        "--max-nodes", type=int, metavar="N", help="most nodes; above --nodes Ray's autoscaler adds them"
    )
    parser.add_argument("--gateways", type=int, default=2, help="how many run")
    parser.add_argument("--cpu", help="CPUs a node asks for, e.g. 2 or 500m")
    parser.add_argument("--memory", default="16Gi", help="memory a node may take; the weights count")
    parser.add_argument("--gpu", type=int, default=0, metavar="COUNT", help="GPUs of a node (nvidia.com/gpu)")
    parser.add_argument("--memory-budget", metavar="SIZE", help="of it for models, as for `medusa cluster start`")
    parser.add_argument("--prewarm", metavar="LIST", help="idle engine processes of a node, e.g. torch=2")
    parser.add_argument("--link", metavar="RATE", help="what a node's network carries, e.g. 10gbit")
    add_list(
        parser, "--allow", "PREFIX[=UID+UID]", "models that functions on the nodes' machines may have of their agents"
    )
    add_list(parser, "--env", "NAME=VALUE", "of nodes")
    add_list(parser, "--secret", "SECRET|VARIABLE=SECRET/KEY", "a Secret with what nodes fetch with")
    parser.add_argument(
        "--token-secret",
        metavar="SECRET",
        help=f"holds the cluster's token under {raycluster.TOKEN_KEY}; without, NAME-token is rendered with a new one",
    )
    parser.add_argument(
        "--client-token-secret",
        metavar="SECRET",
        help=f"holds, under {raycluster.TOKEN_KEY}, a token that the gateways ask of their clients",
    )
    parser.add_argument(
        "--tls",
        action="store_true",
        help="encrypt what nodes and gateways send each other, by certificates of the token",
    )
    parser.add_argument("--head-storage", metavar="SIZE", help="a volume for the head's state, e.g. 1Gi")
    add_list(parser, "--gateway-set", "NAME=VALUE", "a flag of `medusa cluster gateway`, e.g. hold-s=120")
    add_list(parser, "--gateway-env", "NAME=VALUE", "of gateways")
    parser.add_argument("--log-format", choices=LOG_FORMATS, help="of nodes, gateways and instances")
    add_node_arguments(parser)
    add_apply(parser)


def run(arguments: argparse.Namespace) -> int:
    cluster = _cluster(arguments)
    if arguments.apply:
        agent.check_namespace(cluster.placement.namespace)
        cluster = _keep_token(cluster)
    return print_or_apply(
        raycluster.manifests(cluster),
        _comments(cluster),
        agent=agent.AgentDeployment(),
        namespace=cluster.placement.namespace,
        apply=arguments.apply,
    )


def _cluster(arguments: argparse.Namespace) -> RayCluster:
    """Return the validated values for the manifests. Raises ConfigError, which names the flag that cannot be used."""
    if len(values.name(arguments.name)) > _LONGEST_NAME:
        raise ConfigError(f"NAME={arguments.name!r} cannot be used: expected at most {_LONGEST_NAME} characters")
    most = arguments.nodes if arguments.max_nodes is None else arguments.max_nodes
    values.check_range(arguments.nodes, 1, _MOST_NODES, "--nodes")
    values.check_range(most, arguments.nodes, _MOST_NODES, "--max-nodes")
    values.check_range(arguments.gateways, 1, _MOST_GATEWAYS, "--gateways")
    if arguments.tls and most > arguments.nodes:
        raise ConfigError(
            f"--tls with --max-nodes={most} cannot be used, since KubeRay's autoscaler has no certificate: expected no "
            f"more than --nodes={arguments.nodes}"
        )
    placed = parse_placement(argparse.Namespace(**(vars(arguments) | _PLACEMENT_DEFAULTS)))
    if placed.runtime_class:
        values.subdomain(placed.runtime_class, "--runtime-class")
    given = arguments.token_secret
    client = arguments.client_token_secret
    env = values.variables(arguments.env)
    if arguments.allow:
        env["MEDUSA_NODE_ALLOW"] = ",".join(arguments.allow)
    if any(name.startswith("RAY_") for name in env):
        raise ConfigError("--env RAY_…: the node server sets Ray's variables; expected others")
    return RayCluster(
        name=arguments.name,
        image=values.image(arguments.image),
        placement=placed,
        nodes=arguments.nodes,
        most_nodes=most,
        gateways=arguments.gateways,
        token_secret=values.subdomain(given, "--token-secret") if given else f"{arguments.name}-token",
        token=None if given else secrets.token_hex(32),
        head_storage=values.quantity(arguments.head_storage, "--head-storage") if arguments.head_storage else None,
        tls=arguments.tls,
        client_token_secret=values.subdomain(client, "--client-token-secret") if client else None,
        flags=_flags(arguments),
        gateway_flags=_gateway_flags(arguments),
        gateway_env=values.variables(arguments.gateway_env, "--gateway-env"),
        env=env,
    )


def _flags(arguments: argparse.Namespace) -> list[str]:
    """Return the flags of `medusa cluster start`, checked as the node will check them."""
    from medusa_cluster.lab.link_speed import LinkSpeed
    from medusa_runtime.node.settings import node_settings

    given = {"memory_budget_bytes": arguments.memory_budget, "prewarm": arguments.prewarm}
    given["allow"] = ",".join(arguments.allow)
    node_settings({}, {name: value for name, value in given.items() if value})
    if arguments.link:
        LinkSpeed.parse(arguments.link)
    names = ("memory_budget", "prewarm", "link")
    flags = {f"--{name.replace('_', '-')}": getattr(arguments, name) for name in names}
    return [f"{flag}={value}" for flag, value in flags.items() if value] + _log_format(arguments)


def _gateway_flags(arguments: argparse.Namespace) -> list[str]:
    """Return the flags of `medusa cluster gateway`, checked as the gateway will check them."""
    from ..cli.cluster import gateway

    parser = argparse.ArgumentParser(prog="medusa cluster gateway", exit_on_error=False, allow_abbrev=False)
    gateway.add_settings(parser)
    known = ", ".join(action.option_strings[0].removeprefix("--") for action in parser._actions[1:])
    flags = []
    for text in arguments.gateway_set:
        name, sign, value = text.partition("=")
        try:
            _, unknown = parser.parse_known_args([f"--{name}={value}"])
        except argparse.ArgumentError as error:
            raise ConfigError(f"--gateway-set={text!r} cannot be used: {error}") from None
        if unknown or not sign:
            raise ConfigError(f"--gateway-set={text!r} cannot be used: expected NAME=VALUE with one of {known}")
        flags.append(f"--{name}={value}")
    return flags + _log_format(arguments)


def _log_format(arguments: argparse.Namespace) -> list[str]:
    return [] if arguments.log_format is None else [f"--log-format={arguments.log_format}"]


def _keep_token(cluster: RayCluster) -> RayCluster:
    """Return ``cluster`` without a new token if its Secret exists, because running nodes have that one."""
    if cluster.token is None:
        return cluster
    found = kubectl(
        *("get", "secret", cluster.token_secret, "-n", cluster.placement.namespace, "--ignore-not-found", "-o", "name")
    )
    return dataclasses.replace(cluster, token=None) if found.strip() else cluster


def _comments(cluster: RayCluster) -> list[str]:
    namespace = cluster.placement.namespace
    lines = [
        "Made by `medusa deploy cluster`.",
        "Needs the KubeRay operator, 1.6 or newer.",
        f"Needs, for the nodes' folder on their machines: {node_agent.label_command(namespace)}",
    ]
    if cluster.token is not None:
        lines.append(
            f"Secret {cluster.token_secret} is new with every print, and this text shows it; --apply keeps the one "
            "that is there, --token-secret names one of your own."
        )
    lines.append(
        f"Then: kubectl exec -n {namespace} deploy/{cluster.gateway} -- medusa cluster deploy NAME --model URL "
        f"--address {cluster.head} --token-file {raycluster.TOKEN_FILE}" + (" --tls" if cluster.tls else "")
    )
    return lines
