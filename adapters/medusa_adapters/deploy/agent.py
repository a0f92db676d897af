"""`medusa deploy … --node-agent`: the flags of the node agent, and its manifests beside those of a function."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_runtime.errors import ConfigError, DeployError

from .client import kubectl
from .manifests import values
from .manifests.flags import add_list
from .manifests.kubernetes import node_agent, secret
from .manifests.kubernetes.pod import USER, Placement

_FLAGS = ("image", "memory", "cpu", "prewarm", "metrics_port", "secret", "allow", "trust_state")


@dataclass(frozen=True)
class AgentDeployment:
    """The manifests of the node agent, and the notes and warnings for their reader."""

    manifests: Sequence[dict[str, Any]] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()  # what will not work unless something is done


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--node-agent`` and the flags that need it."""
    group = parser.add_argument_group("node agent")
    group.add_argument("--node-agent", action="store_true", help="share weights with the node agent; renders it, too")
    group.add_argument(
        "--node-agent-of-cluster",
        action="store_true",
        help="share weights with the agents of `medusa deploy cluster`, which gets them from peers; renders none",
    )
    group.add_argument("--node-agent-image", help="default: the function's image")
    group.add_argument("--node-agent-memory", help="for regions and warm processes (16Gi)")
    group.add_argument("--node-agent-cpu", help="for warm processes that serve (100m)")
    group.add_argument("--node-agent-prewarm", metavar="ENGINE=N", help="idle engine processes a node, e.g. torch=2")
    group.add_argument("--node-agent-metrics-port", metavar="N", help="GET /metrics of each node; default: none")
    add_list(
        group,
        "--node-agent-secret",
        "SECRET|VARIABLE=SECRET/KEY",
        f"a Secret of namespace {node_agent.NAMESPACE} with what the agent fetches with",
    )
    add_list(
        group, "--node-agent-allow", "PREFIX[=UID+UID]", "further models that functions may have of it, beside --model"
    )
    add_list(
        group,
        "--node-agent-trust-state",
        "PREFIX",
        "beside which models warm engines run the code in state bundles, without it beside none",
    )


def is_requested(arguments: argparse.Namespace) -> bool:
    """Return True if the function uses a node agent."""
    return bool(arguments.node_agent or arguments.node_agent_of_cluster)


def plan_agent(
    arguments: argparse.Namespace, placement: Placement, *, image: str, model: str | None
) -> AgentDeployment:
    """Return the agent for one function. Raises ConfigError for a bad flag, or one that needs ``--node-agent``."""
    if not arguments.node_agent:
        for flag in _FLAGS:
            if getattr(arguments, f"node_agent_{flag}"):
                raise ConfigError(f"--node-agent-{flag.replace('_', '-')} needs --node-agent")
        return _of_cluster(placement, model) if arguments.node_agent_of_cluster else AgentDeployment()
    if arguments.node_agent_of_cluster:
        raise ConfigError("expected --node-agent or --node-agent-of-cluster, found both; a machine has one agent")
    allow = [*_own_model(model), *arguments.node_agent_allow]
    _check(arguments, allow)
    manifests = node_agent.manifests(
        values.image(arguments.node_agent_image or image, "--node-agent-image"),
        memory=values.memory(arguments.node_agent_memory or "16Gi", "--node-agent-memory"),
        cpu=values.quantity(arguments.node_agent_cpu or "100m", "--node-agent-cpu"),
        environment={
            "MEDUSA_NODE_PREWARM": arguments.node_agent_prewarm,
            "MEDUSA_NODE_ALLOW": ",".join(allow),
            "MEDUSA_TRUST_STATE": ",".join(arguments.node_agent_trust_state),
        },
        secrets=[secret.parse_secret(text, "--node-agent-secret") for text in arguments.node_agent_secret],
        metrics_port=arguments.node_agent_metrics_port and int(arguments.node_agent_metrics_port),
        pull_secrets=placement.pull_secrets,
        node_selector=placement.node_selector,
        tolerations=placement.tolerations,
    )
    return AgentDeployment(manifests, _notes(placement, allow), _warnings(arguments, placement, allow))


def _of_cluster(placement: Placement, model: str | None) -> AgentDeployment:
    notes = [f"Needs, for the nodes' folder: {node_agent.label_command(placement.namespace)}"]
    if rules := _own_model(model):
        notes.append(f"The cluster's nodes must give the model out: medusa deploy cluster … --allow {rules[0]}")
    return AgentDeployment(notes=notes)


def _own_model(model: str | None) -> list[str]:
    """Return a rule that lets functions have this model; none for files, which functions read themselves."""
    if model is None or "://" not in model:
        return []
    if "," in model:
        raise ConfigError(f"--model={model!r}: --node-agent needs a URL without a comma, which separates its rules")
    return [f"{model}={USER}"]


def _check(arguments: argparse.Namespace, allow: Sequence[str]) -> None:
    """Raise ConfigError for flags that `medusa node` would refuse."""
    from medusa_runtime.node.settings import node_settings

    given = {
        "prewarm": arguments.node_agent_prewarm,
        "allow": ",".join(allow) or None,
        "trust_state": ",".join(arguments.node_agent_trust_state) or None,
        "metrics_port": arguments.node_agent_metrics_port,
    }
    for field, value in given.items():
        try:
            node_settings({}, {field: value})
        except ConfigError as error:
            flag = field.replace("_", "-")
            raise ConfigError(str(error).replace(f"--{flag}", f"--node-agent-{flag}", 1)) from None


def _notes(placement: Placement, allow: Sequence[str]) -> list[str]:
    notes = [f"Needs, for the node agent's folder: {node_agent.label_command(placement.namespace)}"]
    if allow:
        notes.append(
            f"The node agent gives out {', '.join(allow)}. One agent serves all functions of the cluster: --apply "
            "keeps what it gives out already; here, add other functions' models with --node-agent-allow."
        )
    return notes


def _warnings(arguments: argparse.Namespace, placement: Placement, allow: Sequence[str]) -> list[str]:
    found = []
    if not allow:
        found.append(
            "The node agent will give out no model of a store: name the function's with --model, or with "
            "--node-agent-allow PREFIX."
        )
    if placement.secrets and not arguments.node_agent_secret:
        names = ", ".join(dict.fromkeys(secret.name for secret in placement.secrets))
        found.append(
            f"The node agent has no credentials: --secret {names} is the function's alone. Create the Secret in "
            f"namespace {node_agent.NAMESPACE}, too, and name it with --node-agent-secret."
        )
    if placement.pull_secrets:
        names = ", ".join(placement.pull_secrets)
        found.append(f"The node agent's image needs --pull-secret {names} in namespace {node_agent.NAMESPACE}, too.")
    return found


def check_namespace(namespace: str) -> None:
    """Raise DeployError if this namespace refuses pods that mount the agent's folder."""
    found = json.loads(kubectl("get", "namespace", namespace, "-o", "json"))
    ((label, level),) = node_agent.PRIVILEGED.items()
    # Without the label, the cluster's default applies, which is usually privileged.
    present = (found["metadata"].get("labels") or {}).get(label, level)
    if present != level:
        raise DeployError(
            f"namespace {namespace} enforces Pod Security {present!r}, which refuses the node agent's hostPath; "
            f"change it with: kubectl label --overwrite namespace {namespace} {label}={level}"
        )


def merge_running_rules(documents: Sequence[Mapping[str, Any]]) -> None:
    """Add to the agent in ``documents`` the rules of the one that already runs in the cluster, for other functions."""
    running = kubectl(
        *("get", "daemonset", node_agent.NAME, "-n", node_agent.NAMESPACE, "--ignore-not-found", "-o", "json")
    )
    if not running.strip():
        return
    (ours,) = (document for document in documents if document["kind"] == "DaemonSet")
    wanted, present = (node_agent.variables(daemon) for daemon in (ours, json.loads(running)))
    for name in ("MEDUSA_NODE_ALLOW", "MEDUSA_TRUST_STATE"):
        rules = [rule for text in (wanted.get(name), present.get(name)) if text for rule in text.split(",")]
        if rules:
            node_agent.set_variable(ours, name, ",".join(dict.fromkeys(rules)))
