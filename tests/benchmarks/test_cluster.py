"""The cluster's benchmark: its options, and how rows become a result."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from medusa_runtime.errors import ConfigError

from benchmarks.cluster.__main__ import main
from benchmarks.cluster.options import Options
from benchmarks.result_row import row

EXAMPLE = Path(__file__).parents[2] / "examples" / "pydoc-lm"


def test_rows_of_the_modules_become_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, asked = ModuleType("benchmarks.cluster.chain"), []

    def rows(options: Options) -> list[dict[str, object]]:
        asked.append(options)
        return [row("chain", "ratio_8_to_2", "ratio", [1.2, 1.0, 1.1]), row("origin", "sent_ratio", "ratio", [1.2])]

    module.rows = rows  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "benchmarks.cluster.chain", module)
    file = tmp_path / "rows.json"
    assert main(["--rows", "chain,origin", "--model", str(EXAMPLE), "--link", "20MB", "--json", str(file)]) == 0
    assert [(options.link_bytes_per_s, options.wants("hop")) for options in asked] == [(20e6, False)]
    first, _ = json.loads(file.read_text())["rows"]
    assert first == {
        "name": "chain", "metric": "ratio_8_to_2", "unit": "ratio", "median": 1.1, "min": 1.0, "max": 1.2, "runs": 3,
    }  # fmt: skip
    printed = capsys.readouterr().out
    assert "met       1.10  <= 1.1  chain" in printed
    assert "MISSED    1.20  <= 1.05  origin" in printed


def test_rows_without_a_model_need_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("benchmarks.cluster.decisions")
    module.rows = lambda options: [row("planner", "ms", "ms", [1.0])]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "benchmarks.cluster.decisions", module)
    assert main(["--rows", "planner", "--model", str(tmp_path / "none")]) == 0
    with pytest.raises(ConfigError, match="expected a checkpoint"):
        main(["--rows", "planner,chain", "--model", str(tmp_path / "none")])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rows", "speed"), "expected names of chain, origin, hop"),
        (("--nodes", "1"), "--nodes of 2"),
        (("--model", "/nowhere"), "no config.json"),
    ],
)
def test_bad_calls_are_refused(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        main(["--model", str(EXAMPLE), *arguments])
