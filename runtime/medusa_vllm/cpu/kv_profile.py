"""Measures the memory that a forward of vLLM takes on this CPU, for the KV plan (MEDUSA §6).

It runs offline, in a new process. Arguments: model, file to write. Standard input: the settings as JSON.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_runtime.config import Settings
from medusa_runtime.device.choice import choose
from medusa_runtime.engine.base import Delta, GenerateRequest, SamplingParams
from medusa_runtime.engine.forward_memory import MOST_TOKENS, measure_forward
from medusa_runtime.errors import EngineError
from medusa_runtime.state.offline import run_module

from ..offline import fetch_and_import

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
    stop, found = threading.Event(), queue.SimpleQueue[int | None | Exception]()
    vocabulary = engine.info.vocab_size

    def drive() -> None:
        try:
            engine.wait_ready()
            _forward(engine, 1 % vocabulary, tokens)  # makes threads and buffers that stay, so it is not measured
            found.put(
                measure_forward(
                    lambda: _forward(engine, 2 % vocabulary, tokens),
                    settings,
                    tokens=tokens,
                    vocabulary=vocabulary,
                    retained_bytes=retained_bytes,
                )
            )
        except Exception as error:  # noqa: BLE001  raised again in the thread that waits
            found.put(error)
        finally:
            stop.set()

    threading.Thread(target=drive, name="measure", daemon=True).start()
    try:
        engine.run(stop)
    finally:
        engine.close()
    result = found.get()
    if isinstance(result, Exception):
        raise result
    return result


def _forward(engine: VllmEngine, token: int, tokens: int) -> None:
    """Run a forward pass of ``tokens`` tokens, none of which vLLM has cached."""
    ended = queue.SimpleQueue[Delta]()

    def sink(delta: Delta) -> None:
        if delta.finish_reason is not None:
            ended.put(delta)

    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    engine.add(GenerateRequest(f"profile-{token}", (token,) * tokens, params), sink)
    if (reason := ended.get().finish_reason) != "length":
        raise EngineError(f"a forward of {tokens} tokens ended with {reason}, expected a token")


if __name__ == "__main__":
    sys.exit(main())
