"""Functions of one node agent against functions that share nothing: real processes, a counting origin."""

import json
from pathlib import Path

import pytest
from medusa_adapters.bench.coldstart.node_sharing import node_targets
from medusa_adapters.bench.result import Result

from benchmarks.coldstart.__main__ import main

EXAMPLE = Path(__file__).parents[3] / "examples" / "pydoc-lm"


def test_functions_of_a_node_fetch_once_and_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.json"
    flags = ["--model", str(EXAMPLE), "--origin", "http", "--instances", "2", "--node", "--runs", "1"]
    assert main([*flags, "--json", str(out)]) == 0
    rows = {(row["name"], row["metric"]): row["median"] for row in json.loads(out.read_text())["rows"]}
    weights_mb = (EXAMPLE / "model.safetensors").stat().st_size / 1e6
    assert weights_mb <= rows["origin", "sent_mb"] < 1.5 * weights_mb  # once; beside it small files and a first look
    assert rows["function", "pss_mb"] > 0
    assert rows["node", "pss_mb"] > 2 * rows["function", "pss_mb"]
    assert "bytes the origin sent, to the weights" in capsys.readouterr().out


def test_weights_that_are_there_twice_miss_the_target() -> None:
    def targets(node: float, sent: float) -> list[bool]:
        result = Result({})
        for name, metric, value in (("alone", "pss_mb", 1100), ("node", "pss_mb", node), ("weights", "size_mb", 1000)):
            result.add(name, metric, "MB", [float(value)])
        result.add("origin", "sent_mb", "MB", [sent])
        return [target.met for target in node_targets(result, 10)]

    assert targets(1900, 1001) == [True, True]
    assert targets(3100, 2002) == [False, False]
