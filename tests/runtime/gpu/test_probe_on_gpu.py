"""The probe's cases as tests: small graphs of real kernels, materialized and restored on a real GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import probe

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CASES = (
    "product of 1 row",
    "product of 64 rows",
    "rms norm",
    "silu",
    "copy and zero",
    "two layers",
    "triton variants",
    "programmatic pair",
    "attention",
)
STEPS = {
    "same process by handle: ": "first",
    "same process by image: ": "first",
    "restored: ": "restore",
    "restored: , elsewhere": "restore-elsewhere",
}


@pytest.fixture(scope="module")
def found(cuda: object, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The probe's evidence: that of the probe that benchmarks/gpu/run.py has just run, or of a new one."""
    out = Path(os.environ.get("PROBE_EVIDENCE") or tmp_path_factory.mktemp("probe"))
    if not (out / "probe/probe.json").exists():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(probe, "_GROUPS", probe._GROUPS[:2])
            probe.main(["--out", str(out)])
    report: dict[str, Any] = json.loads((out / "probe/probe.json").read_text())
    return report


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("case", CASES)
def test_a_graph_gives_the_captured_bits(found: dict[str, Any], case: str, step: str) -> None:
    facts = found["results"][STEPS[step]]
    fact = facts.get(step.partition(",")[0] + case)
    assert fact is not None, (
        f"it was not reached: {facts.get(f'capture {case}', facts.get('failed', facts.get('status')))}"
    )
    assert fact.get("equal"), fact
    assert not fact.get("read back"), fact["read back"]


@pytest.mark.parametrize(
    "row", ["an image for each kernel", "two captures", "pool at its address", "programmatic edges"]
)
def test_what_restoring_relies_on(found: dict[str, Any], row: str) -> None:
    judged = {name: (one, details) for name, one, details in found["rows"]}
    assert judged[row][0] == "ok", judged[row][1]


def test_evidence_is_packed(found: dict[str, Any]) -> None:
    assert found["dry run"] is False
    nodes = [
        node for key, fact in found["results"]["first"].items() if key.startswith("graph ") for node in fact["nodes"]
    ]
    assert all("attributes" in node for node in nodes if "name" in node)
