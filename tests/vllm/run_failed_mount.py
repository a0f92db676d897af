"""Run by tests with an interpreter that has vLLM: an engine goes on after vLLM's own HTTP server could not be mounted.

python run_failed_mount.py CHECKPOINT FLAGS → one JSON line on standard output
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from typing import Any

import medusa_vllm  # noqa: F401  makes --engine vllm known
from medusa_runtime.config import Settings
from medusa_runtime.engine.base import Delta, GenerateRequest, SamplingParams
from medusa_runtime.errors import MedusaError
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.region.reader import Region
from medusa_runtime.timeline import Timeline

PATIENCE_S = 30.0
TOKENS = 32


def main(checkpoint: str, flags: str) -> dict[str, Any]:
    settings = Settings(model=checkpoint, engine="vllm", kv_cache_mb=64, max_concurrency=4, threads=2, vllm_args=flags)
    region, timeline = Region.create(), Timeline.create("engine")
    prefetch(region, checkpoint, settings=settings, timeline=timeline)
    from medusa_runtime.zygote import load_engine_class

    engine: Any = load_engine_class(settings)(region, settings, timeline)
    threading.Thread(target=engine.run, args=(threading.Event(),), daemon=True).start()
    error = ""
    try:
        engine.open_http()
    except MedusaError as found:
        error = str(found)
    before = engine._core.output_queue.qsize()
    answered: queue.Queue[Delta] = queue.Queue()
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    engine.add(GenerateRequest("one", (3, 14, 15), params), answered.put)
    while answered.get(timeout=PATIENCE_S).finish_reason is None:
        pass
    deadline = time.monotonic() + PATIENCE_S
    while threads() and time.monotonic() < deadline:
        time.sleep(0.05)
    return {"error": error, "queued": engine._core.output_queue.qsize() - before, "threads": threads()}


def threads() -> list[str]:
    """The threads that vLLM's front end has in the core."""
    return [thread.name for thread in threading.enumerate() if thread.name in ("vllm-inputs", "vllm-outputs")]


if __name__ == "__main__":
    out = os.dup(1)
    os.dup2(2, 1)  # whatever else is printed is not the answer
    os.write(out, json.dumps(main(*sys.argv[1:3])).encode() + b"\n")
    os._exit(0)
