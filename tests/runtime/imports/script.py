"""A script of a test, in a process that is forked after a lean import of torch."""

from __future__ import annotations

import sys
import warnings


def execute(arguments: list[str]) -> None:
    """Run a script as ``python -W error -c`` does, with the arguments behind it."""
    warnings.simplefilter("error")
    script, *sys.argv[1:] = arguments
    exec(compile(script, "<script>", "exec"), {"__name__": "__main__"})
