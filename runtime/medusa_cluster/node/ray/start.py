"""Ray's own command line, changed so that it can start on a busy machine: ``python -m … start …``.

A raylet waits 15 s for two helpers in Python, and then ends. On busy cores they take that long. ``ray start`` waits
30 s for the raylet, even if it has ended. On a machine where eight nodes start at the same time, or where a node has a
quarter of a core, no node would ever come up.

So this module gives the raylet at once what its helpers would report: the port for runtime environments, which we
choose, and the dashboard's ports, which are not used. And ``ray start`` waits longer, as long as the raylet lives.

A raylet also ends when one of the two helpers does, with the status 0. ``ray start`` would not mind, and wait for ever
without it. Here it ends, so that the node server starts Ray again.

This changes private functions of Ray. A version of Ray without these functions starts unchanged.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

_TIMEOUT_S = 120.0
_PAUSE_S = 0.2
_NEEDED = ("raylet", "gcs_server")  # Ray's names of the processes without which it does not work
_STORED_S = 2.0  # after a raylet's end, for the GCS to store that its node and its actors have ended
_NOT_IN_USE = -1  # the dashboard's ports in Ray's minimal installation


def main(arguments: Sequence[str]) -> int:
    """Run ``ray`` with these arguments, and return its exit status."""
    if not extend_ray_timeouts():
        print("this version of Ray gives a raylet no more than 30 s to start", file=sys.stderr)
    if not end_with_ray():
        print("this version of Ray does not start again if its raylet ends with the status 0", file=sys.stderr)
    (command,) = entry_points(group="console_scripts", name="ray")
    sys.argv = ["ray", *arguments]
    return int(command.load()() or 0)


def extend_ray_timeouts() -> bool:
    """Change how ``ray start`` starts a raylet and waits for it. Return whether this version of Ray allows it."""
    try:
        from ray._private import services

        get_node, start_raylet = services.get_node, services.start_raylet
    except (ImportError, AttributeError):
        return False
    raylets: list[Any] = []

    @functools.wraps(start_raylet)
    def start(*arguments: Any, **options: Any) -> Any:
        started = start_raylet(*arguments, **options)
        raylets.append(getattr(started, "process", None))
        _write_ports(inspect.signature(start_raylet).bind(*arguments, **options).arguments)
        return started

    services.start_raylet = start
    services.get_node = _with_timeout(get_node, lambda: any(raylet and raylet.poll() is not None for raylet in raylets))
    return True


def end_with_ray() -> bool:
    """Change ``ray start --block`` so that it ends with Ray's processes, whatever their exit status.

    Return whether this version of Ray allows it.
    """
    try:
        from ray._private.node import Node

        dead_processes = Node.dead_processes
    except (ImportError, AttributeError):
        return False

    @functools.wraps(dead_processes)
    def dead(node: Any) -> Any:
        found = dead_processes(node)
        if ended := [f"{name} (exit status {process.returncode})" for name, process in found if name in _NEEDED]:
            time.sleep(_STORED_S)
            print(f"Ray needs what has ended: {', '.join(ended)}", file=sys.stderr, flush=True)
            os._exit(1)  # its parent ends the others
        return found

    Node.dead_processes = dead
    return True


def _write_ports(raylet: dict[str, Any]) -> None:
    """Write the files that a raylet with these arguments waits for, before its helpers write them."""
    try:
        names: Any = import_module("ray._raylet")
        ports = {
            names.RUNTIME_ENV_AGENT_PORT_NAME: raylet["runtime_env_agent_port"],
            names.METRICS_AGENT_PORT_NAME: _NOT_IN_USE,
            names.METRICS_EXPORT_PORT_NAME: _NOT_IN_USE,
            names.DASHBOARD_AGENT_LISTEN_PORT_NAME: _NOT_IN_USE,
        }
        for name, port in ports.items():
            names.persist_port(raylet["session_dir"], raylet["node_id"], name, port)
    except (ImportError, AttributeError, KeyError, TypeError) as error:
        print(f"this version of Ray waits for its helpers: {error}", file=sys.stderr)


def _with_timeout(get_node: Callable[..., Any], ended: Callable[[], bool]) -> Callable[..., Any]:
    """Wrap Ray's ``get_node``, so that it waits up to 120 s for a node that is not there yet.

    The program exits as soon as ``ended()`` says that the raylet has ended.
    """

    @functools.wraps(get_node)
    def find(*arguments: Any, **options: Any) -> Any:
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                return get_node(*arguments, **options)
            except RuntimeError:
                if ended():
                    sys.exit("the raylet has ended; its log has the reason")
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_S)

    return find


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
