from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from medusa_adapters.bench.result import Result, Row, Target, machine_facts, targets_table


def test_json_has_the_common_form(tmp_path: Path) -> None:
    result = Result()
    result.add("medusa", "mb_per_s", "MB/s", [3.0, 1.0, 2.5])
    result.add("absent", "mb_per_s", "MB/s", [])
    result.write(tmp_path / "result.json")

    found = json.loads((tmp_path / "result.json").read_text())

    assert set(found) == {"machine", "rows"}
    assert found["rows"] == [
        {"name": "medusa", "metric": "mb_per_s", "unit": "MB/s", "median": 2.5, "min": 1.0, "max": 3.0, "runs": 3}
    ]


def test_machine_is_described_but_not_named() -> None:
    facts = machine_facts()

    assert set(facts) == {"cpu", "cores", "memory_gb", "kernel", "python"}
    assert int(facts["cores"]) >= 1
    assert "/" not in "".join(str(value) for value in facts.values())
    assert Path("/proc/sys/kernel/hostname").read_text().strip() not in str(list(facts.values()))


def test_ratio_of_medians_is_none_where_a_side_is_missing() -> None:
    result = Result()
    result.add("ours", "s", "s", [1.0, 2.0, 9.0])
    result.add("theirs", "s", "s", [4.0])

    assert result.ratio("s", "ours", "theirs") == 0.5
    assert result.ratio("s", "ours", "nobody") is None
    assert result.ratio("other", "ours", "theirs") is None


def test_a_row_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples of mb_per_s for medusa"):
        Row.of("medusa", "mb_per_s", "MB/s", [])


def test_tables_show_each_row_and_whether_targets_are_met() -> None:
    result = Result()
    result.add("medusa", "mb_per_s", "MB/s", [3210.0])
    assert re.search(r"medusa +mb_per_s +3,210 +3,210 +3,210 +MB/s +1", result.table())

    text = targets_table([Target("fast", 0.9, 0.85), Target("slow", 0.8, 0.85), Target("lean", 0.4, 0.5, False)])
    assert [line.split()[0] for line in text.splitlines()] == ["met", "MISSED", "met"]
