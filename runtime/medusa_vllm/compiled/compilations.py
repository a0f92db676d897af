"""Counts what this process compiled with torch.compile, from the durations that torch records for each step."""

from __future__ import annotations

import sys
from typing import NamedTuple


class Compilations(NamedTuple):
    """Numbers of compilations.

    ``traced``: functions that Dynamo traced. ``generated``: graphs that Inductor generated code for. ``built``: files
    that a C++ compiler was started for, including its probes of the CPU.
    """

    traced: int
    generated: int
    built: int


def compilations() -> Compilations:
    """Return the counts of this process, including the processes that it was forked from. Imports nothing."""
    utils = sys.modules.get("torch._dynamo.utils")
    times = {} if utils is None else utils.compilation_time_metrics

    def count(*steps: str) -> int:
        return sum(len(times.get(step, ())) for step in steps)

    return Compilations(
        traced=count("fullgraph_capture", "_compile.compile_inner"),
        generated=count("fx_codegen_and_compile"),
        built=count("compile_file"),
    )
