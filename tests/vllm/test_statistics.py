"""vLLM's metrics of adapters: what callers choose does not make the page grow."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

pytestmark = pytest.mark.vllm

MODEL = Path(__file__).parents[2] / "examples" / "pydoc-lm"


def test_lists_of_adapters_do_not_make_the_page_grow() -> None:
    from medusa_vllm.serving.statistics import Statistics
    from vllm.config.lora import LoRAConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.metrics.stats import SchedulerStats

    config = EngineArgs(model=str(MODEL)).create_engine_config()
    config.lora_config = LoRAConfig(max_loras=8)
    statistics = Statistics(config, "m")
    for names in itertools.islice(itertools.permutations("abcdefgh"), 1000):
        statistics.logger().record(SchedulerStats(running_lora_adapters=dict.fromkeys(names, 1)), None)
    samples = [line for line in statistics.page().splitlines() if line.startswith("vllm:lora_requests_info{")]
    assert len(samples) <= 100
    assert any(f'running_lora_adapters="{",".join(names)}"' in line for line in samples)
