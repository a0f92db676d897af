"""`medusa cluster status`: nodes, models, copies, instances, transfers and events."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from medusa_runtime.errors import ConfigError, NoControllerError

from ..progress import size
from .connection import add_connection, ask

_EVENTS = 8
_CLEAR = "\x1b[H\x1b[2J\x1b[3J"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page about the cluster to this file")
    parser.add_argument("--watch", action="store_true", help="again every second, until Ctrl-C")
    add_connection(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.html is not None:
        return _write_page(arguments)
    while True:
        try:
            found = ask(arguments, "status", {})
            text = json.dumps(found, indent=None if arguments.watch else 2) + "\n" if arguments.json else table(found)
        except NoControllerError as error:
            if not arguments.watch:
                raise
            text = f"{error}\n"
        clear = arguments.watch and not arguments.json and sys.stdout.isatty()
        sys.stdout.write((_CLEAR if clear else "") + text)
        sys.stdout.flush()
        if not arguments.watch:
            return 0
        time.sleep(1)


def _write_page(arguments: argparse.Namespace) -> int:
    """Write the page that a gateway serves under ``/`` to a file, as it is now."""
    from medusa_cluster.gateway.page import page

    if arguments.json or arguments.watch:
        raise ConfigError("expected --html without --json and --watch")
    text = page.html(ask(arguments, "status", {}), refresh=False)
    try:
        arguments.html.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html: {arguments.html} cannot be written: {error.strerror}") from None
    return 0


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def table(status: dict[str, Any]) -> str:
    """Return the status as lines of text."""
    lines = [_count(len(status["nodes"]), "node")]
    lines += [f"  {line}" for node in status["nodes"] for line in _node(node, status["at"])]
    lines.append(_count(len(status["models"]), "model"))
    lines += [f"  {line}" for model in status["models"] for line in _model(model)]
    if status["transfers"]:
        lines.append("transfers")
        lines += [f"  {_transfer(transfer)}" for transfer in status["transfers"]]
    lines += [f"chain of {chain['url']}: {' -> '.join(chain['nodes'])}" for chain in status["chains"]]
    lines += [f"gateway {gateway['name']}: {gateway['url'] or 'no URL'}" for gateway in status["gateways"]]
    if status["events"]:
        lines.append("last events")
        lines += [
            f"  {time.strftime('%H:%M:%S', time.localtime(event['at']))} {event['text']}"
            for event in status["events"][-_EVENTS:]
        ]
    return "\n".join(lines) + "\n"


def _node(node: dict[str, Any], now: float) -> list[str]:
    memory = f"{size(node['memory_used_bytes'])} of {size(node['memory_bytes'])}"
    link = f"link {size(node['link_bytes_per_s'])}/s"
    named = f" ({node['device_name']})" if node["device_name"] else ""
    gpus = f", {_count(node['devices'], 'GPU')}{named}" if node["devices"] else ""
    found = [f"{node['name']} {node['address']} {node['state']}, {memory}, {link}{gpus}"]
    for copy in node["models"]:
        pinned = ", pinned" if copy["pinned"] else ""
        arrived = f"{size(copy['fetched_bytes'])} of {size(copy['total_bytes'])}"
        found.append(f"  copy {copy['url']}: {copy['state']}, {arrived}{pinned}")
    for instance in node["instances"]:
        age_s = max(now - instance["since"], 0)  # by the controller's clock
        helps = f", helps {instance['helps']}" if instance["helps"] else ""
        revision = f", revision {instance['revision']}" if instance["outdated"] else ""
        found.append(f"  instance {instance['id']}: {instance['state']} for {age_s:.0f} s{helps}{revision}")
    return found


def _model(model: dict[str, Any]) -> list[str]:
    copies = ", ".join(model["copies"]) or "no node"
    found = [
        f"{model['name']}: {model['instances']} of {model['min']} to {model['max']} instances, "
        f"{model['running']} running, {model['waiting']} waiting, copies on {copies}, revision {model['revision']}"
    ]
    if model["replacing"]:
        return [*found, f"  replaces {model['replacing']}"]
    return [*found, f"  the last try failed: {model['failure']}"] if model["failure"] else found


def _transfer(transfer: dict[str, Any]) -> str:
    done = f"{size(transfer['done_bytes'])} of {size(transfer['total_bytes'])}"
    left = "" if transfer["remaining_s"] is None else f", {transfer['remaining_s']:.1f} s left"
    return f"{transfer['from']} -> {transfer['to']}: {transfer['url']}, {done}, {size(transfer['bytes_per_s'])}/s{left}"
