"""The pictures of the documents are what their command draws, and files that a browser shows without a network."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from medusa_adapters.report.gantt import render_text
from medusa_runtime.timeline import Stage

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs" / "pictures"
NAMES = ("start.svg", "report.svg", "structure.svg")
COMMAND = (sys.executable, "-m", "benchmarks.pictures")


def test_the_command_draws_what_the_documents_show(tmp_path: Path) -> None:
    subprocess.run([*COMMAND, "--out", tmp_path], cwd=ROOT, check=True, capture_output=True)
    for name in NAMES:
        assert (tmp_path / name).read_text() == (PICTURES / name).read_text(), "run python -m benchmarks.pictures"


def test_the_quickstart_shows_the_same_start_as_text() -> None:
    record = json.loads((PICTURES / "start.json").read_text())
    chart = render_text([Stage(**stage) for stage in record["stages"]])
    assert f"\n```\n{chart}\n```\n" in (ROOT / "docs" / "quickstart.md").read_text(), chart


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_stands_alone(name: str) -> None:
    text = (PICTURES / name).read_text()
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert "<script" not in text
    assert len(text) < 20_000
    assert "prefers-color-scheme:dark" in text


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_start_is_measured_and_drawn(tmp_path: Path) -> None:
    model = ROOT / "examples/pydoc-lm"
    arguments = ["--measure", "--model", model, "--runs", "1", "--out", tmp_path]
    subprocess.run([*COMMAND, *arguments], cwd=ROOT, check=True, capture_output=True)
    record = json.loads((tmp_path / "start.json").read_text())
    names = ["medusa serve", "… from a snapshot", "… pre-warmed", "transformers"]
    assert [row["name"] for row in record["rows"]] == names
    assert {"fetch", "first_token"} <= {stage["name"] for stage in record["stages"]}
    assert ">first_token<" in (tmp_path / "start.svg").read_text()
