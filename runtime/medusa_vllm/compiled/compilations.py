"""How often this process compiled something with torch.compile, from the times that torch keeps of every such step."""

from __future__ import annotations

import sys
from typing import NamedTuple


class Compilations(NamedTuple):
    """``traced``: functions that Dynamo took apart. ``generated``: graphs that Inductor made code for. ``built``: files
    that a C++ compiler was started for, its probes of the CPU among them."""

    traced: int
    generated: int
    built: int


def compilations() -> Compilations:
    """Since the process started; those of processes it was forked from count too. Imports nothing."""
    utils = sys.modules.get("torch._dynamo.utils")
    times = {} if utils is None else utils.compilation_time_metrics

    def count(*steps: str) -> int:
        return sum(len(times.get(step, ())) for step in steps)

    return Compilations(
        traced=count("fullgraph_capture", "_compile.compile_inner"),
        generated=count("fx_codegen_and_compile"),
        built=count("compile_file"),
    )
