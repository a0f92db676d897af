"""A restored CUDA graph that breaks the device's context, and what becomes of the instance."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from waiting import until

Start = Callable[..., Any]
BREAKING = Path(__file__).with_name("breaking_gpu.py")


@pytest.mark.forked
@pytest.mark.timeout(300)
def test_the_next_engine_captures_what_broke_the_one_before(start: Start, example: Path, tmp_path: Path) -> None:
    expected = start("--model", example).complete()["choices"][0]["text"]
    wrapper, cache = [sys.executable, str(BREAKING)], tmp_path / "cache"
    serving = start("--model", example, "--state", "none", wrapper=wrapper, env={"XDG_CACHE_HOME": str(cache)})
    # An answer of the first engine's could be lost.
    until(lambda: "they broke the device's context before" in serving.output(), serving.output)
    serving.wait_ready()
    assert serving.complete()["choices"][0]["text"] == expected
    output = serving.output()
    assert output.count("a restored CUDA graph broke the device's context") == 1
    assert output.count("the engine process was killed by SIGABRT; forking a new one") == 1
    assert output.count("CUDA graphs are captured, not restored: they broke the device's context before") == 1
    (entry,) = json.loads((cache / "medusa/quarantine.json").read_text()).values()
    assert entry["reason"] == "a restored CUDA graph broke the context"
    timeline = serving.request("GET", "/timeline")[1]["stages"]
    assert sum(stage["name"] == "fetch" for stage in timeline) == 1, "the region outlives its engines"
    assert serving.stop() == 0
