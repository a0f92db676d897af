"""The command `medusa simulate`: its table, its numbers and its page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from medusa_adapters.cli.command_line import run

pytest.importorskip("simpy")

FLEET = """
name: <small>
machines: [{name: a10, count: 4, device: a10, link: 16Gbit, memory: 188GB}]
models: [{name: chat, count: 4, profile: llama2-7b@a10, device: a10, slo: {ttft: 7.5, tpot: 0.2}}]
requests: {rate: [0.2, 0.4], cv: 2, seconds: 60}
strategies: [medusa, vllm]
device_hour: 2
"""


class _Balanced(HTMLParser):
    """Counts tags that are opened and not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_runs_are_shown_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    report, numbers = tmp_path / "report.html", tmp_path / "numbers.json"
    words = ["simulate", str(tmp_path / "fleet.yaml"), "--what-if", "--json", str(numbers), "--report", str(report)]
    assert run(words) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[:4]] == ["medusa", "vllm", "medusa", "vllm"]
    assert "(half as many machines more)" in shown
    runs = json.loads(numbers.read_text())["runs"]
    assert {run["change"] for run in runs} >= {"", "links and disks of twice the speed"}
    assert all(run["cost"] == pytest.approx(2 * run["device_hours"]) for run in runs)
    page = report.read_text()
    assert "&lt;small&gt;" in page
    assert "<script" not in page
    assert page.count("<svg") == 3
    balanced = _Balanced()
    balanced.feed(page)
    assert balanced.open == []


def test_only_the_strategies_that_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    assert run(["simulate", str(tmp_path / "fleet.yaml"), "--strategies", "paraserve"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {"paraserve"}


def test_bad_calls_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET.replace("7.5", "soon"))
    assert run(["simulate", str(tmp_path / "fleet.yaml")]) == 2
    assert 'models[0].slo.ttft: expected a number of at least 0, found "soon"' in capsys.readouterr().err
    assert run(["simulate", str(tmp_path / "fleet.yaml"), "--strategies", "magic"]) == 2


def test_the_example_of_the_page_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[3] / "examples/fleet/two-testbeds.yaml"
    shorter = example.read_text().replace("seconds: 900", "seconds: 60").replace("rate: [0.4, 0.8]", "rate: 0.4")
    (tmp_path / "fleet.yaml").write_text(shorter)
    assert run(["simulate", str(tmp_path / "fleet.yaml"), "--what-if", "--report", str(tmp_path / "fleet.html")]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 10
