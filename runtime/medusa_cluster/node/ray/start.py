"""Ray's own command line, made to start on a busy machine: ``python -m … start …``.

A raylet waits 15 s for two helpers in Python, which take that long where others have the cores, and then ends.
`ray start` waits 30 s for the raylet, also for one that has ended. On a machine where eight nodes start at a time, or
where a node has a quarter of a core, none of them would ever come up. So the raylet is told at once what its helpers
will tell it: the runtime environments' port was chosen by us, and nobody uses the dashboard's. And `ray start` waits
longer, for a raylet that lives. All this changes private functions of Ray; a Ray that has none of them starts as it
does by itself.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

_PATIENCE_S = 120.0
_PAUSE_S = 0.2
_NOT_IN_USE = -1  # as Ray's minimal installation says of the dashboard's ports


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status of `ray`."""
    if not be_patient():
        print("this version of Ray gives a raylet no more than 30 s to start", file=sys.stderr)
    (command,) = entry_points(group="console_scripts", name="ray")
    sys.argv = ["ray", *arguments]
    return int(command.load()() or 0)


def be_patient() -> bool:
    """Change how `ray start` starts a raylet and looks for it. Returns whether this Ray has what is changed."""
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
        _tell_ports(inspect.signature(start_raylet).bind(*arguments, **options).arguments)
        return started

    services.start_raylet = start
    services.get_node = _patient(get_node, lambda: any(raylet and raylet.poll() is not None for raylet in raylets))
    return True


def _tell_ports(raylet: dict[str, Any]) -> None:
    """Write the files for which a raylet with these arguments waits, before its helpers do."""
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


def _patient(get_node: Callable[..., Any], ended: Callable[[], bool]) -> Callable[..., Any]:
    """Have it look for a node that is not there yet for longer than its caller would, unless its raylet has ended."""

    @functools.wraps(get_node)
    def find(*arguments: Any, **options: Any) -> Any:
        deadline = time.monotonic() + _PATIENCE_S
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
