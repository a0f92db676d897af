"""`medusa node`: this node's agent, and what it holds."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from medusa_runtime.node.settings import NODE_OPTIONS, REPEATED, NodeSettings, node_settings

from .progress import size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Keep models in memory and engine processes warm for all functions of this node. "
        "Every flag has an environment variable (lists with commas); the flag wins."
    )
    for option in NODE_OPTIONS:
        parser.add_argument(
            option.flag,
            dest=option.field,
            action="append" if option.field in REPEATED else "store",
            metavar=option.form,
            help=f"{option.help} [{', '.join(option.variables)}]".replace("%", "%%"),
        )
    asks = parser.add_mutually_exclusive_group()
    asks.add_argument("--status", action="store_true", help="show what the running agent holds, and end")
    asks.add_argument("--drop", metavar="URL", help="have the running agent unpin and evict a model, and end")
    parser.add_argument("--json", action="store_true", help="with --status: as JSON")


def run(arguments: argparse.Namespace) -> int:
    given = {option.field: getattr(arguments, option.field) for option in NODE_OPTIONS}
    flags = {name: ",".join(value) if isinstance(value, list) else value for name, value in given.items()}
    settings = node_settings(os.environ, flags)
    if arguments.status or arguments.drop:
        return _ask(settings, arguments)
    return _serve(settings)


def _serve(settings: NodeSettings) -> int:
    from medusa_runtime.node.agent import Agent

    from .serve import configure_logging

    configure_logging(settings.log_level)
    agent = Agent(settings)
    warm = ", ".join(f"{count} {kind}" for kind, count in settings.prewarm.items()) or "none"
    print(
        f"node agent on {settings.socket}: {size(agent.regions.budget_bytes)} for models, idle engines: {warm}",
        flush=True,
    )
    return agent.run()


def _ask(settings: NodeSettings, arguments: argparse.Namespace) -> int:
    from medusa_runtime.node.client import NodeClient

    client = NodeClient(settings.socket)
    try:
        if arguments.drop:
            client.drop(arguments.drop)
            print(f"dropped {arguments.drop}")
            return 0
        status = client.status()
    finally:
        client.close()
    sys.stdout.write(json.dumps(status, indent=2) + "\n" if arguments.json else _table(status))
    return 0


def _table(status: dict[str, Any]) -> str:
    lines = [
        f"node agent {status['pid']} on {status['socket']}, up {status['uptime_s']:.0f} s",
        f"models: {size(status['used_bytes'])} of {size(status['budget_bytes'])}",
    ]
    for kind, engine in status["engines"].items():
        line = f"{kind} engines: {engine['warm']} of {engine['wanted']} warm, {engine['taken']} taken"
        lines.append(f"{line}; given up: {engine['failure']}" if engine["failure"] else line)
    for held in status["regions"]:
        pinned = ", pinned" if held["pinned"] else ""
        lines.append(
            f"  {held['url']}: {held['state']}, {size(held['fetched_bytes'])} of {size(held['total_bytes'])}, "
            f"used by {held['in_use_by']}{pinned}"
        )
    return "\n".join(lines) + "\n"
