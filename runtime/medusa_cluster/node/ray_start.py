"""Ray's own command line, with more patience for a raylet that starts on a busy machine: ``python -m … start …``.

`ray start` gives a raylet 30 s, asks for it without a pause meanwhile, and ends it if it is late. On a machine where
eight nodes start at a time, or where a node has a quarter of a core, none of them would ever come up.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

_PATIENCE_S = 120.0
_PAUSE_S = 0.2


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status of `ray`."""
    if not be_patient():
        print("this version of Ray gives a raylet no more than 30 s to start", file=sys.stderr)
    (command,) = entry_points(group="console_scripts", name="ray")
    sys.argv = ["ray", *arguments]
    return int(command.load()() or 0)


def be_patient() -> bool:
    """Change the function by which `ray start` looks for its raylet. Returns whether this Ray has it: it is private."""
    try:
        from ray._private import services

        get_node = services.get_node
    except (ImportError, AttributeError):
        return False
    services.get_node = _patient(get_node)
    return True


def _patient(get_node: Callable[..., Any]) -> Callable[..., Any]:
    """Have it look for a node that is not there yet for longer than its caller would."""

    @functools.wraps(get_node)
    def find(*arguments: Any, **options: Any) -> Any:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return get_node(*arguments, **options)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE_S)

    return find


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
