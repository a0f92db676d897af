"""`medusa node`: run this machine's node agent, or ask the one that runs."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from medusa_runtime.errors import ConfigError, MedusaError
from medusa_runtime.node.settings import NODE_OPTIONS, REPEATED, NodeSettings, node_settings

from . import serving_process
from .progress import size

if TYPE_CHECKING:
    from medusa_runtime.node.companion import Companion


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
            help=f"{option.help} [{option.variable}]".replace("%", "%%"),
        )
    parser.add_argument(
        "action",
        nargs="?",
        type=_action,
        choices=("status", "ping"),
        help="status: show what the running agent holds; ping: end with 0 if the running agent answers, else 1 (for "
        "liveness probes)",
    )
    parser.add_argument("--timeout-s", type=_timeout, default=2.0, help="with ping: how long to wait")
    parser.add_argument("--drop", metavar="URL", help="have the running agent unpin and evict a model, and end")
    parser.add_argument("--json", action="store_true", help="with status: as JSON")


def _action(text: str) -> str:
    if text in ("start", "run", "serve"):
        raise ConfigError(f"expected `medusa node` alone, which starts the agent, found {text!r} behind it")
    return text


def _timeout(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.05 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected seconds from 0.05 to 3600, found {text!r}")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    given = {option.field: getattr(arguments, option.field) for option in NODE_OPTIONS}
    flags = {name: REPEATED[name].join(value) if isinstance(value, list) else value for name, value in given.items()}
    settings = node_settings(os.environ, flags)
    if arguments.action is not None and arguments.drop:
        raise ConfigError(f"expected {arguments.action} without --drop")
    if arguments.action == "ping":
        return _ping(settings, arguments.timeout_s)
    if arguments.action == "status" or arguments.drop:
        return _ask(settings, arguments)
    return _serve(settings)


def _serve(settings: NodeSettings) -> int:
    from medusa_runtime.logs import configure_logging
    from medusa_runtime.node.agent import Agent

    serving_process.check_agent(settings)
    configure_logging(settings.log_level, settings.log_format)
    serving_process.log_use(next(iter(settings.prewarm), "torch"), settings.snapshots)
    agent = Agent(settings, _metrics(settings))
    warm = ", ".join(f"{count} {kind}" for kind, count in settings.prewarm.items()) or "none"
    sockets = ", ".join(listening.path for listening in settings.socket)
    line = f"node agent on {sockets}: {size(agent.budget_bytes)} for models, idle engines: {warm}"
    say = logging.getLogger(__name__).info if settings.log_format == "json" else partial(print, flush=True)
    return agent.run(lambda: say(line))


def _metrics(settings: NodeSettings) -> Companion | None:
    if settings.metrics_port is None:
        return None
    from medusa_runtime.node.companion import Companion

    from .node_metrics import open_listener, serve

    listener = open_listener(settings.metrics_port)
    return Companion("metrics", listener.fileno(), lambda: serve(listener, settings.path))


def _ask(settings: NodeSettings, arguments: argparse.Namespace) -> int:
    from medusa_runtime.node.client import NodeClient

    client = NodeClient(settings.path)
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


def _ping(settings: NodeSettings, timeout_s: float) -> int:
    from medusa_runtime.node.client import NodeClient

    try:
        NodeClient(settings.path, waits=max(round(timeout_s * 100), 1)).close()
    except MedusaError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _table(status: dict[str, Any]) -> str:
    lines = [
        f"node agent {status['pid']} on {status['socket']}, up {status['uptime_s']:.0f} s",
        f"models: {size(status['used_bytes'])} of {size(status['budget_bytes'])}",
    ]
    if status.get("left_bytes"):  # an older agent has none
        lines.append(f"  of this, {size(status['left_bytes'])} are replaced or dropped models that functions still use")
    for kind, engine in status["engines"].items():
        line = f"{kind} engines: {engine['warm']} of {engine['wanted']} warm, {engine['taken']} taken"
        lines.append(f"{line}; given up: {engine['failure']}" if engine["failure"] else line)
    if status["refused"]:
        lines.append("refused: " + ", ".join(f"{count} {code}" for code, count in sorted(status["refused"].items())))
    for held in status["regions"]:
        pinned = ", pinned" if held["pinned"] else ""
        lines.append(
            f"  {held['url']}: {held['state']}, {size(held['fetched_bytes'])} of {size(held['total_bytes'])}, "
            f"used by {held['in_use_by']}{pinned}"
        )
    return "\n".join(lines) + "\n"
