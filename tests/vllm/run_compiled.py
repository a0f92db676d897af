"""Run by tests with an interpreter that has vLLM: one greedy answer of our engine, with a compile cache or without.

python run_compiled.py CHECKPOINT BLOB|none SETTINGS_AS_JSON → one JSON line on standard output
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from medusa_runtime.config import Settings
from medusa_runtime.engine.base import Delta, GenerateRequest, SamplingParams
from medusa_runtime.fetch.prefetcher import prefetch
from medusa_runtime.region.reader import Region
from medusa_runtime.state.kinds import file_name
from medusa_runtime.timeline import Timeline
from medusa_vllm import COMPILE_CACHE


def main() -> None:
    checkpoint, blob, more = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    settings = Settings(**{"model": checkpoint, "engine": "vllm", "kv_cache_mb": 64, "max_concurrency": 4} | more)
    region, timeline = Region.create(), Timeline.create("engine")
    prefetch(region, checkpoint, settings=settings, timeline=timeline)
    if blob != "none":
        region.attach_file(file_name(COMPILE_CACHE.name), Path(blob).read_bytes())
    from medusa_runtime.zygote import load_engine_class

    engine = load_engine_class(settings)(region, settings, timeline)
    stop, deltas = threading.Event(), list[Delta]()

    def sink(delta: Delta) -> None:
        deltas.append(delta)
        if delta.finish_reason is not None:
            stop.set()

    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    engine.add(GenerateRequest("one", "def main(argv):\n", params), sink)
    engine.run(stop)
    answer = {
        "tokens": [token for delta in deltas for token in delta.token_ids],
        "stages": {stage.name: stage.detail for stage in timeline.stages()},
        "compilations": engine.stats()["compilations_total"],
    }
    engine.close()
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
