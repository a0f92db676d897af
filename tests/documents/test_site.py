"""The site that `make docs` builds: every link leads somewhere, and a browser asks no other host for anything."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="mkdocs is not installed; make docs installs it")

ROOT = Path(__file__).parents[2]
# What a browser loads without being asked, by element.
LOADED = {"link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src"}


class _Loads(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in LOADED and values.get("rel") != "canonical":
            self.found.add(values.get(LOADED[tag]) or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    docs = ROOT / "docs"
    for page in docs.rglob("*.md"):
        assert (site / page.relative_to(docs).with_suffix(".html")).exists(), page


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        loads = _Loads()
        loads.feed(page.read_text())
        assert [url for url in loads.found if re.match(r"(https?:)?//", url)] == [], page
    for style in site.rglob("*.css"):
        assert re.findall(r"url\([\"']?(?:https?:)?//[^)]*", style.read_text()) == [], style


def test_nothing_but_pages_pictures_and_the_theme_is_published(site: Path) -> None:
    published = {
        path.relative_to(site).parts[0] for path in site.rglob("*") if path.is_file() and path.suffix != ".html"
    }
    assert published <= {"assets", "pictures", "search", "sitemap.xml", "sitemap.xml.gz", "404.html"}
