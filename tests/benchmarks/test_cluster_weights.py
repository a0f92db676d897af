"""The cluster benchmark's rows about weights, once, with small numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cluster import chain, forwarding
from benchmarks.cluster.options import Options

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.root,
    pytest.mark.slow,
]

MODEL = Path(__file__).parents[2] / "examples" / "pydoc-lm"


def test_copies_by_a_chain() -> None:
    rows = chain.rows(Options(model=MODEL, rows=("chain",), nodes=3, link_bytes_per_s=20e6, runs=1))
    found = {(row["name"], row["metric"]): row["median"] for row in rows}
    assert set(found) == {
        ("chain", "ratio_3_to_2"),
        ("chain", "two_s"),
        ("chain", "all_s"),
        ("origin", "sent_ratio"),
        ("hop", "link_share"),
        ("hop", "cpu_s_per_gb"),
        ("hop", "ahead_cpu_s_per_gb"),
        ("floor", "ratio_3_to_2"),
        ("floor", "ratio_over_floor"),
        ("floor", "all_s"),
        ("floor", "link_share"),
        ("floor", "cpu_s_per_gb"),
    }
    assert found["origin", "sent_ratio"] < 1.5


def test_serving_beside_weights() -> None:
    rows = forwarding.rows(Options(model=MODEL, rows=("forwarding",), nodes=3, link_bytes_per_s=5e6, runs=1))
    assert {row["metric"] for row in rows} == {
        "tpot_p99_ratio",
        "tpot_p99_ratio_unpaced",
        "tpot_p99_ratio_unpaced_local",
        "tpot_p99_ratio_elsewhere",
        "tpot_p99_noise",
        "tpot_p99_alone_ms",
        "tpot_p99_elsewhere_ms",
        "tpot_p99_paced_ms",
        "tpot_p99_unpaced_ms",
        "tpot_p99_elsewhere_local_ms",
        "tpot_p99_unpaced_local_ms",
        "link_share_paced",
        "link_share_unpaced",
        "sender_cpus_paced",
        "sender_cpus_unpaced",
    }
