"""The report is one page that loads nothing, and its charts show the numbers."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from medusa_adapters.bench.coldstart.command import add_rows, median_sample
from medusa_adapters.bench.coldstart.contestants import Sample
from medusa_adapters.bench.result import Result
from medusa_adapters.report.html import html
from medusa_runtime.timeline import Stage

from benchmarks.coldstart.rows import LABELS

MS = 1_000_000
STAGES = (
    Stage("exec", "supervisor", 0, 30 * MS, {}),
    Stage("im<port", "zygote", 40 * MS, 900 * MS, {}),
    Stage("first_token", "engine", 900 * MS, 900 * MS, {}),
)
SAMPLES = {
    "torch": [Sample(0.8), Sample(1.0, ready_s=1.1, pss_mb=250.0, stages=STAGES), Sample(1.4)],
    "transformers": [Sample(4.0), Sample(3.0), Sample(5.0)],
}
VOID = {"meta", "link", "br", "img", "input", "hr"}


class Balanced(HTMLParser):
    """Fails on a tag that closes what is not open; collects text and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page() -> str:
    result = Result()
    add_rows(result, SAMPLES)
    return html(result, STAGES, "torch", labels=LABELS)


def test_the_page_is_whole_and_loads_nothing() -> None:
    parser = Balanced()
    parser.feed(page())
    assert parser.open == []
    assert not {"script", "link", "img", "iframe"} & set(parser.names)
    assert not any(name in ("src", "href") for name, _ in parser.attributes)
    assert "url(" not in page()
    assert "prefers-color-scheme:dark" in page()


def test_names_by_strangers_are_text() -> None:
    attack = """'"><script>alert(1)</script><img src=x onerror=y>"""
    stages = [stage._replace(name=f"{stage.name}{attack}", process=f"{stage.process}{attack}") for stage in STAGES]
    result = Result()
    add_rows(result, {name + attack: samples for name, samples in SAMPLES.items()})
    parser = Balanced()
    parser.feed(html(result, stages, f"torch{attack}", labels={}))
    assert not {"script", "img"} & set(parser.names)
    assert not any(name.startswith("on") for name, _ in parser.attributes)


def test_the_headline_is_the_median_and_the_ratio() -> None:
    text = page()
    assert ">1.00 s <" in text
    assert "<strong>4.0×</strong> faster than transformers" in text


def test_the_bars_are_in_proportion() -> None:
    widths = [float(width) for width in re.findall(r'class="bar" style="width:([\d.]+)%"', page())]
    assert round(widths[1] / widths[0], 2) == 4.0
    for text in ("medusa-runtime</span>", "transformers</span>", "1 s</span>", "4 s</span>"):
        assert text in page()


def test_the_timeline_is_drawn_to_scale() -> None:
    bars = [float(width) for width in re.findall(r'class="stage" style="left:[\d.]+%;width:([\d.]+)%', page())]
    assert round(bars[1] / bars[0], 1) == round(860 / 30, 1)
    assert set(re.findall(r"no stage: [\d.]+ ms", page())) == {"no stage: 10.0 ms"}
    assert "im&lt;port</span>" in page()


def test_a_reader_who_knows_no_docs_is_told_what_is_what() -> None:
    result = Result()
    add_rows(result, SAMPLES | {"torch-import": [Sample(0.6)], "floor": [Sample(0.7)]})
    subject = {"model": "tiny <llama>", "date": "2030-01-01 12:00 UTC", "torch": "2.9"}
    text = html(result, STAGES, "torch", subject, LABELS)
    answered, _, yardsticks = text.partition("work without an answer")
    first_token = answered.partition("Time to the first token")[2]
    assert "import torch</span>" not in first_token
    assert "import torch</span>" in yardsticks
    assert "medusa-runtime can be below it" in yardsticks
    assert "faster than plain floor" not in text
    for fact in ("tiny &lt;llama&gt;", "2030-01-01 12:00 UTC", "<dt>torch</dt><dd>2.9</dd>"):
        assert fact in text


def test_gaps_and_optional_numbers_become_rows() -> None:
    result = Result()
    add_rows(result, SAMPLES)
    assert result.median("torch", "gap_ms") == 10
    assert result.median("torch", "ready_s") == 1.1
    assert result.median("transformers", "ready_s") is None
    assert median_sample(SAMPLES["torch"]).ttft_s == 1.0
    assert median_sample(SAMPLES["transformers"][:2]).ttft_s == 3.0


def test_a_page_without_cold_starts() -> None:
    result = Result()
    result.add("torch", "tokens_per_s_b8", "tokens/s", [40.0, 44.0])
    parser = Balanced()
    text = html(result, (), "torch")
    parser.feed(text)
    assert parser.open == []
    assert text.count('class="chart"') == 1
