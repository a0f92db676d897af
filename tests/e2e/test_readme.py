"""What the README shows is what happens."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def test_the_function_of_the_readme_answers_as_shown(start: Callable[..., Any], tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"(?ms)^```(\w*)\n(.*?)^```", text)
    handler = next(block for language, block in blocks if language == "python")
    session = next(block for _, block in blocks if block.startswith("$ medusa serve"))
    (tmp_path / "handler.py").write_text(handler)
    serve, curl, answer = session.strip().splitlines()
    arguments = [
        {"examples/pydoc-lm": str(ROOT / "examples/pydoc-lm"), "handler.py": str(tmp_path / "handler.py")}.get(
            word, word
        )
        for word in shlex.split(serve.removeprefix("$ medusa serve"))
    ]
    serving = start(*arguments)
    body = shlex.split(curl.removeprefix("$ "))[-1]
    status, result, _ = serving.request("POST", "/", json.loads(body))
    assert (status, result) == (200, json.loads(answer))
    status, result, _ = serving.request("POST", "/", {"text": "This function returns"})
    assert (status, result) == (400, {"error": 'expected {"prompt": "some text"}'})
    assert serving.stop() == 0


def test_the_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_between_documents_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"
