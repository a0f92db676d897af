"""Manifests, printed or applied with kubectl."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from . import agent as node_agent
from .client import kubectl
from .manifests import document


def add_apply(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--apply", action="store_true", help="apply with kubectl instead of printing")


def print_or_apply(
    documents: Sequence[Mapping[str, Any]],
    comments: Sequence[str],
    *,
    agent: node_agent.AgentDeployment,
    namespace: str,
    apply: bool,
) -> int:
    """Print the documents below their comments, or apply them. ``agent`` is the node agent among them."""
    comments = [*comments, *agent.notes, *agent.warnings]
    if not apply:
        sys.stdout.write(document.text(documents, comments))
        return 0
    if agent.manifests:
        node_agent.check_namespace(namespace)
        node_agent.merge_running_rules(agent.manifests)
    sys.stdout.write(kubectl("apply", "-f", "-", stdin=document.text(documents, comments)))
    for warning in agent.warnings:
        print(f"medusa: {warning}", file=sys.stderr)
    return 0
