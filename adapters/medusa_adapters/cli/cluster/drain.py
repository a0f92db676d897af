"""`medusa cluster drain`: move copies and requests off a node before it ends."""

from __future__ import annotations

import argparse
import time

from medusa_runtime.errors import ClusterError, ConfigError, NoControllerError

from .connection import add_connection, ask

_LOOK_S = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE", help="the node's name, see medusa cluster status")
    parser.add_argument("--undo", action="store_true", help="let the node take instances and copies again")
    parser.add_argument(
        "--drain-s", type=float, metavar="S", help="how long running requests may go on before they move; default: 30"
    )
    parser.add_argument("--wait-s", type=float, default=600.0, metavar="S", help="how long to wait; 0: not at all")
    add_connection(parser)


def run(arguments: argparse.Namespace) -> int:
    if not arguments.wait_s >= 0:  # nor nan
        raise ConfigError(f"--wait-s: expected seconds, 0 or more, found {arguments.wait_s:g}")
    found = ask(arguments, "drain", {"node": arguments.node, "undo": arguments.undo, "drain_s": arguments.drain_s})
    deadline = time.monotonic() + (0 if arguments.undo else arguments.wait_s)
    while found["state"] not in ("drained", "lost") and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        try:
            nodes = ask(arguments, "status", {})["nodes"]
        except NoControllerError:
            continue
        found = next((node for node in nodes if node["name"] == arguments.node), {"state": "lost"})
    print(f"{arguments.node}: {found['state']}")
    if found["state"] == "draining" and arguments.wait_s:
        raise ClusterError(f"{arguments.node} was not drained within {arguments.wait_s:g} s; it goes on draining")
    return 0
