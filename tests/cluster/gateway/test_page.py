"""The page about a cluster: whole, safe, and readable at any width in a real browser."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser
from cluster_stand_in import StandIn
from cluster_status_sample import status
from medusa_cluster.gateway.page import page

VOID = {"meta", "link", "br", "img", "input", "hr"}


class _Balanced(HTMLParser):
    """Fails on a tag that closes what is not open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()
        self.urls: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.urls += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _parsed(found: dict[str, Any], *, refresh: bool = True) -> _Balanced:
    parser = _Balanced()
    parser.feed(page.html(found, refresh=refresh))
    assert parser.open == []
    return parser


def _hostile(value: Any) -> Any:
    """The same status, where every text is an attack."""
    if isinstance(value, dict):
        return {name: _hostile(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_hostile(part) for part in value]
    return f'"><script>alert(1)</script><b onload=x {value}' if isinstance(value, str) else value


def test_the_page_is_whole_and_loads_nothing() -> None:
    parser = _parsed(status())
    assert parser.urls == ["data:,"]
    text = page.html(status(), refresh=True)
    assert set(re.findall(r"url\([^)]*\)", text)) == {"url(#tip)"}
    assert "prefers-color-scheme:dark" in text
    assert "script" not in _parsed(status(), refresh=False).names


def test_it_shows_what_there_is() -> None:
    text = re.sub(r"<[^>]*>", " ", page.body(status()))
    for shown in ("7 of 8", "n3 → n4", "49.8 MB/s", "116 s left", "62 %", "41 running, 7 waiting", "gw-2", "waiting"):
        assert shown in text, shown


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), float("inf"), float("nan"), "\ud800", '"><img src=x onerror=y>', None]
)
def test_whatever_value_stands_anywhere_is_a_page(value: Any) -> None:
    def replaced(found: Any) -> Any:
        if isinstance(found, dict):
            return {name: replaced(each) for name, each in found.items()}
        return [replaced(each) for each in found] if isinstance(found, list) else value

    text = page.html(replaced(copy.deepcopy(status())), refresh=True)
    assert "<img" not in text
    assert text.encode()


@pytest.mark.parametrize("part", ["nodes", "models", "transfers", "chains", "gateways", "events"])
def test_nothing_of_a_kind_is_no_error(part: str) -> None:
    _parsed(status() | {part: []})
    _parsed({name: value for name, value in status().items() if name != part})


def test_a_status_that_has_nothing_is_a_page() -> None:
    assert "None is deployed yet" in page.html({}, refresh=False)
    assert "has been away for" in page.html({"controller_away_s": 12.0}, refresh=False)


def test_names_cannot_break_out() -> None:
    attack = _hostile(status())
    parser = _parsed(attack, refresh=False)
    assert "script" not in parser.names
    assert "<script>" not in page.body(attack)
    assert "onload=x" not in re.sub(r'"[^"]*"', "", "".join(re.findall(r"<[^>]*>", page.body(attack))))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 10, 11, 24, 25, 300])
def test_any_number_of_nodes_is_drawn(count: int) -> None:
    found = status()
    found["nodes"] = [copy.deepcopy(found["nodes"][0]) | {"name": f"n{number}"} for number in range(count)]
    _parsed(found)
    body = page.body(found)
    assert ('class="map"' in body) == (count <= 24)
    numbers = [float(n) for n in re.findall(r'\bc?[xy]="(-?[\d.]+)"', body.partition("</svg>")[0])]
    assert all(0 <= value <= 620 for value in numbers)


@pytest.fixture
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    with Browser() as started:
        yield started


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_and_a_screen(browser: Browser, tmp_path: Path, dark: bool) -> None:
    file = tmp_path / "page.html"
    file.write_text(page.html(status(), refresh=False))
    for width in (360, 390, 768, 1280):
        browser.open(file.as_uri(), width, dark=dark)
        assert browser.value("document.documentElement.scrollWidth") <= width
        outside = "[...document.querySelectorAll('main *')].filter(e => {const r = e.getBoundingClientRect();"
        outside += "return r.width && (r.right > innerWidth + 1 || r.left < -1)}).map(e => e.outerHTML.slice(0, 80))"
        assert browser.value(outside) == []
        browser.picture(tmp_path / f"{width}-{'dark' if dark else 'light'}.png")
    colour = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", colour))) < 200) == dark
    assert browser.errors == []


def test_it_follows_the_cluster(browser: Browser, cluster: StandIn, start_gateway: Callable[..., Any]) -> None:
    """Its script is allowed to run, and says when the gateway no longer answers."""
    cluster.status = status()
    gateway = start_gateway()
    browser.open(gateway.url + "/", 390)
    assert "qwen-4 starts on n4" in browser.value("document.body.innerText")
    cluster.status["events"] = [cluster.status["events"][0] | {"text": "something new has happened"}]
    browser.until("document.body.innerText.includes('something new has happened')")
    assert browser.errors == []
    gateway.kill()
    browser.until("document.body.classList.contains('stale')")
