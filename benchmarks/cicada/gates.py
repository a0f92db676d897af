"""What gates cost a warm forward: the built module beside a plain one over the same tensors, in turns."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from medusa_adapters.bench.result import Result
from medusa_runtime.config import Settings
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

_WARM_UP = 3
_FEWEST, _LONGEST_S = 5, 60.0  # of a machine that is busy with other things, fewer forwards


def measure_gates(result: Result, model: str, folder: Path, forwards: int) -> None:
    """Adds rows ``<model>/built`` and ``<model>/plain``, metric ``warm_s``, of at most ``forwards`` forwards each."""
    import torch
    from medusa_runtime.load.factory.build import build
    from medusa_runtime.load.factory.options import BuildOptions

    from benchmarks.cicada.workloads.workload import workload

    chosen = workload(model)
    region = Region.create()
    prefetch(region, str(folder), settings=Settings(), timeline=Timeline.create("gates"))
    before = torch.get_default_dtype()
    torch.set_default_dtype(chosen.dtype)
    try:
        with torch.inference_mode():
            built, loader = build(region, lambda: chosen.factory().eval(), BuildOptions(rename=chosen.rename))
            with loader:
                loader.wait()
            plain = chosen.factory().eval()
            plain.load_state_dict(built.state_dict(), assign=True)
            seconds = _in_turns(chosen, {"built": built, "plain": plain}, forwards)
    finally:
        torch.set_default_dtype(before)
        region.close()
    for name, taken in seconds.items():
        result.add(f"{model}/{name}", "warm_s", "s", taken)


def _in_turns(chosen: Any, modules: dict[str, Any], forwards: int) -> dict[str, list[float]]:
    inputs = chosen.inputs()
    seconds: dict[str, list[float]] = {name: [] for name in modules}
    ends = time.monotonic() + _LONGEST_S
    for number in range(_WARM_UP + forwards):
        if number >= _WARM_UP + _FEWEST and time.monotonic() > ends:
            break
        for name in list(modules) if number % 2 == 0 else reversed(modules):
            began = time.perf_counter()
            chosen.forward(modules[name], inputs)
            if number >= _WARM_UP:
                seconds[name].append(time.perf_counter() - began)
    return seconds
