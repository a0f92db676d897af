"""The benchmark that runs two checkouts in turn, with one checkout as both."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_checkout_is_as_fast_as_itself(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.before",
        sys.executable,
        "--model",
        "examples/pydoc-lm",
        "--pairs",
        "1",
    ]
    run = subprocess.run([*command, "--json", tmp_path / "found.json"], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    rows = {
        (row["name"], row["metric"]): row["median"] for row in json.loads((tmp_path / "found.json").read_text())["rows"]
    }
    for metric in ("ttft_s", "all_cpu_s", "zygote_cpu_s", "function_cpu_s"):
        assert 0.1 < rows["start, now", metric] / rows["start, before", metric] < 10
    for row, metric in (("livez", "median_ms"), ("livez", "p99_ms"), ("limited-fetch", "fetch_s")):
        assert rows[f"{row}, now", metric] >= 0
        assert f"{row}: {metric}, times before" in run.stdout
    assert rows["fetch, now", "cpu_s"] > rows["import, now", "cpu_s"] > 0
    assert "start: ttft_s, times before" in run.stdout
