"""The burst of the cluster's benchmark, once and small."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.cluster.burst import rows
from benchmarks.cluster.options import Options

EXAMPLE = Path(__file__).parents[2] / "examples" / "pydoc-lm"


@pytest.mark.cluster
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("tc"), reason="needs root and iproute2, to make namespaces")
def test_instances_come_and_go_and_each_request_is_answered_as_by_one() -> None:
    found = {row["metric"]: row["median"] for row in rows(Options(EXAMPLE, ("burst",), nodes=2, runs=1))}
    assert found["lost"] == found["changed"] == 0
    assert found["instances"] == 2
    assert found["requests"] > 0
