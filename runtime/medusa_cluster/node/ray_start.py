"""Ray's own command line, with more patience for a raylet that starts on a busy machine: ``python -m … start …``.

`ray start` gives a raylet 30 s, asks for it without a pause meanwhile, and ends it if it is late. On a machine where
eight nodes start at a time, or where a node has a quarter of a core, none of them would ever come up.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

_PATIENCE_S = 120.0
_PAUSE_S = 0.2


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status of `ray`."""
    from ray._private import services
    from ray.scripts import scripts

    if hasattr(services, "get_node"):  # it is no public name
        services.get_node = _patient(services.get_node)
    sys.argv = ["ray", *arguments]
    status = scripts.main()
    return int(status or 0)


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
