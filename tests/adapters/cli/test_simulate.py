"""The command `medusa simulate`: its table, its numbers and its page."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser
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
    assert "(1.5 times the machines)" in shown
    runs = json.loads(numbers.read_text())["runs"]
    assert {run["change"] for run in runs} >= {"", "links and disks 2 times as fast"}
    assert all(run["cost"] == pytest.approx(2 * run["device_hours"]) for run in runs)
    page = report.read_text()
    assert "&lt;small&gt;" in page
    assert "<script" not in page
    assert page.count("<svg") == 3
    balanced = _Balanced()
    balanced.feed(page)
    assert balanced.open == []


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_is_readable_on_a_phone_and_on_a_screen(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET.replace("vllm", "serverlessllm"))
    report = tmp_path / "report.html"
    assert run(["simulate", str(tmp_path / "fleet.yaml"), "--what-if", "--report", str(report)]) == 0
    with Browser() as browser:
        for width in (360, 390, 1280):
            browser.open(report.as_uri(), width)
            assert browser.value("document.documentElement.scrollWidth") <= width
            outside = "[...document.querySelectorAll('main *')].filter(e => !e.closest('.wide > *') && "
            outside += "e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"
            assert browser.value(outside) == []
            # Texts of a chart: large enough, and none upon another.
            boxes = "[...document.querySelectorAll('svg')].map(svg => [...svg.querySelectorAll('text')].map(e => {"
            boxes += "const r = e.getBoundingClientRect(); return [r.left, r.right, r.top, r.bottom]}))"
            for texts in browser.value(boxes):
                assert min(round(bottom - top, 2) for _, _, top, bottom in texts) >= 10
                for number, (left, right, top, bottom) in enumerate(texts):
                    upon = [
                        o
                        for o in texts[:number]
                        if o[0] < right and left < o[1] and o[2] + 2 < bottom and top + 2 < o[3]
                    ]
                    assert upon == [], (width, texts[number])
            names = "[...document.querySelectorAll('.wide td:first-child')].map(e => {const r = document.createRange();"
            names += "r.selectNode(e.firstChild); return r.getClientRects().length})"
            assert set(browser.value(names)) == {1}  # none is broken in two
        assert browser.errors == []


def test_what_if_says_which_change_meets_the_goal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scarce = FLEET.replace("count: 4, device", "count: 1, devices: 2, device").replace("rate: [0.2, 0.4]", "rate: 0.4")
    words = ["simulate", str(tmp_path / "fleet.yaml"), "--what-if", "--strategies", "vllm"]
    report = tmp_path / "report.html"
    for goal, said in (
        (0, "which meets the goal of 0 % as it is."),
        (100, "None of the changes meets the goal of 100 %"),
    ):
        (tmp_path / "fleet.yaml").write_text(f"{scarce}\ngoal: {goal}")
        assert run([*words, "--report", str(report)]) == 0
        assert said in capsys.readouterr().out
        assert said in report.read_text()
    slack = scarce.replace("ttft: 7.5", "ttft: 30")
    (tmp_path / "fleet.yaml").write_text(f"{slack}\ngoal: 95")
    assert run([*words, "--report", str(report)]) == 0
    assert "The goal of 95 % is met with" in capsys.readouterr().out


def test_the_page_begins_with_the_cheapest_strategy_that_meets_the_goal(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    words = ["simulate", str(tmp_path / "fleet.yaml"), "--strategies", "medusa,full", "--report", str(report)]
    for goal, said in (
        (1, "<strong>medusa</strong>, the cheapest strategy that meets the goal under the hardest load"),
        (99.9, "<strong>full</strong>, the cheapest strategy that meets the goal under the hardest load"),
    ):
        (tmp_path / "fleet.yaml").write_text(f"{FLEET}\ngoal: {goal}".replace("ttft: 7.5", "ttft: 2"))
        assert run(words) == 0
        assert said in report.read_text()


def test_without_slos_every_first_token_counts_as_in_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET.replace(", slo: {ttft: 7.5, tpot: 0.2}", ""))
    assert run(["simulate", str(tmp_path / "fleet.yaml"), "--strategies", "medusa"]) == 0
    shown = capsys.readouterr()
    assert "no model has an slo with a ttft" in shown.err
    assert shown.out.count("first token in time 100.0 %") == 2
    assert "requests" in shown.out


def test_only_the_strategies_that_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET)
    assert run(["simulate", str(tmp_path / "fleet.yaml"), "--strategies", "paraserve"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} == {"paraserve"}


def test_bad_calls_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fleet.yaml").write_text(FLEET.replace("7.5", "soon"))
    assert run(["simulate", str(tmp_path / "fleet.yaml")]) == 2
    assert 'models[0].slo.ttft: expected a number of at least 0, in seconds, found "soon"' in capsys.readouterr().err
    (tmp_path / "fleet.yaml").write_text(FLEET)
    assert run(["simulate", str(tmp_path / "fleet.yaml"), "--strategies", "magic"]) == 2
    assert "--strategies: expected a strategy of medusa" in capsys.readouterr().err
    for option in ("--report", "--json"):
        for file in (tmp_path / "none" / "file", tmp_path):
            assert run(["simulate", str(tmp_path / "fleet.yaml"), option, str(file)]) == 2
            shown = capsys.readouterr()
            assert f"{option}: expected a file in a folder that is there" in shown.err
            assert shown.out == ""


def test_the_example_of_the_page_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    example = Path(__file__).parents[3] / "examples/fleet/two-testbeds.yaml"
    shorter = example.read_text().replace("seconds: 900", "seconds: 60").replace("rate: [0.4, 0.8]", "rate: 0.4")
    (tmp_path / "fleet.yaml").write_text(shorter)
    assert run(["simulate", str(tmp_path / "fleet.yaml"), "--what-if", "--report", str(tmp_path / "fleet.html")]) == 0
    assert len(capsys.readouterr().out.splitlines()) >= 10
