"""The rows about the policy's own time, with a small cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cluster import decisions
from benchmarks.cluster.options import Options


def test_every_kind_of_decision_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "_NODES", 60)
    monkeypatch.setattr(decisions, "_MODELS", 12)
    rows = decisions.rows(Options(Path(), ("planner", "decisions", "crowded"), runs=2))
    assert [(row["name"], row["metric"]) for row in rows[:2]] == [("planner", "ms"), ("decisions", "ms")]
    assert (rows[-1]["name"], rows[-1]["metric"]) == ("crowded", "ms")
    assert {row["metric"] for row in rows[2:]} >= {"first_ms", "burst_on_100_models_ms", "death_of_100_nodes_ms"}
    assert all(row["runs"] == 2 and row["unit"] == "ms" for row in rows)


def test_the_planner_reaches_every_device() -> None:
    routes = decisions.planner(devices=50)()
    assert isinstance(routes, list)
    assert len(routes) == 50
