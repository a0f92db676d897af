"""`medusa bench fetch`: a checkpoint from its store, by real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from medusa_adapters.bench.fetch import METRICS, NAME
from medusa_adapters.cli.main import main

from benchmarks.origin import Origin, Variant

EXAMPLE = Path(__file__).parents[3] / "examples" / "pydoc-lm"


def test_each_run_fetches_the_whole_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, weights = tmp_path / "fetch.json", EXAMPLE / "model.safetensors"
    with Origin(EXAMPLE, tmp_path / "origin", Variant("plain"), builtin=True, counting=True) as origin:
        assert main(["bench", "fetch", origin.url, "--runs", "2", "--json", str(out)]) == 0
        assert origin.sent_bytes() >= 2 * weights.stat().st_size
    rows = {row["metric"]: row for row in json.loads(out.read_text())["rows"] if row["name"] == NAME}
    assert {metric: row["unit"] for metric, row in rows.items()} == METRICS
    assert all(row["runs"] == 2 and row["median"] > 0 for row in rows.values())
    assert "mb_per_s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected a checkpoint"),
        ([str(EXAMPLE), "--runs", "0"], "--runs=0"),
        (["http://127.0.0.1:9/nothing", "--runs", "1"], "[Storage."),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "fetch", *arguments]) != 0
    errors = capsys.readouterr().err
    assert said in errors
    assert "Traceback" not in errors
