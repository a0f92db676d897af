"""Measures the memory that a forward of vLLM takes on this CPU, for the KV plan (MEDUSA §6).

It runs offline, in a new process. Arguments: model, file to write. Standard input: the settings as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_runtime.config import Settings
from medusa_runtime.device.choice import choose
from medusa_runtime.engine.base import SamplingParams
from medusa_runtime.engine.forward_memory import MOST_TOKENS, measure_forward
from medusa_runtime.state.offline import run_module

from ..offline import complete, fetch_and_import, serve_beside

if TYPE_CHECKING:
    from ..engine import VllmEngine


def capture(model: str, settings: Settings, folder: Path) -> Path | None:
    """Write a file with the plan. Return None for the other engine, and on a GPU, where vLLM's worker measures itself.

    Raises StateError with the last line of the process's output when it fails.
    """
    if settings.engine != "vllm" or choose(settings.device, os.environ) == "cuda":
        return None
    made = folder / "kv-plan"
    run_module(__name__, [model, str(made)], settings, "the memory of a forward could not be measured")
    return made


def main() -> int:
    model, out = sys.argv[1], Path(sys.argv[2])
    # Each start determines the free memory itself.
    settings = replace(Settings(**json.load(sys.stdin)), model=model, compile="never", state="none", kv_cache_mb=None)
    settings = replace(settings, tensor_parallel=1)
    region, timeline = fetch_and_import(settings)
    from medusa_runtime.state.kv_plan import plan_to_record

    from ..engine import VllmEngine
    from .kv_budget import estimated_activation_bytes, geometry, token_bytes

    engine = VllmEngine(region, settings, timeline)
    shape = geometry(engine.config)
    tokens = min(settings.max_batched_tokens, MOST_TOKENS, engine.info.max_model_len - 1)
    retained_bytes = -(-tokens // shape.block_tokens) * shape.block_tokens * token_bytes(engine.config)
    measured = _measured(engine, settings, tokens, retained_bytes)
    if measured is None:
        measured = estimated_activation_bytes(engine.config, region, settings)
    out.write_bytes(plan_to_record(shape, settings, activation_bytes=measured).to_bytes())
    return 0


def _measured(engine: VllmEngine, settings: Settings, tokens: int, retained_bytes: int) -> int | None:
    """Measure the second forward, in a thread beside the engine's loop."""
    vocabulary = engine.info.vocab_size

    def measure() -> int | None:
        _forward(engine, 1 % vocabulary, tokens)  # makes threads and buffers that stay, so it is not measured
        return measure_forward(
            lambda: _forward(engine, 2 % vocabulary, tokens),
            settings,
            tokens=tokens,
            vocabulary=vocabulary,
            retained_bytes=retained_bytes,
        )

    try:
        return serve_beside(engine, measure)
    finally:
        engine.close()


def _forward(engine: VllmEngine, token: int, tokens: int) -> None:
    """Run a forward pass of ``tokens`` tokens, none of which vLLM has cached."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    complete(engine, [[token] * tokens], params, f"profile-{token}")


if __name__ == "__main__":
    sys.exit(main())
