"""docs/quickstart.md and docs/handler.md, as somebody follows them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from medusa_adapters.trial import Trial

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pydoc-lm"


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each fenced block."""
    return re.findall(r"(?ms)^```(\w*)\n(.*?)^```", (ROOT / "docs" / page).read_text())


BLOCKS = blocks("quickstart.md")


def test_the_model_answers_as_the_page_says() -> None:
    curl = next(block for _, block in BLOCKS if block.startswith("curl "))
    _, url, *_, body = shlex.split(curl.replace("\\\n", " "))
    with Trial("--model", str(EXAMPLE)) as function:
        answer = function.post(url.removeprefix("localhost:8080"), body, {"content-type": "application/json"})
    assert answer.json["choices"][0]["text"] == " the value of the value."


def test_the_function_of_the_page_runs_without_a_server(tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(next(block for _, block in BLOCKS if block.startswith("# hello.py")))
    (command,) = (block for _, block in BLOCKS if block.startswith("medusa run "))
    _, *arguments = shlex.split(command)
    ran = subprocess.run(
        [sys.executable, "-m", "medusa_adapters", *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert f"`{ran.stdout.strip()}`" in (ROOT / "docs/quickstart.md").read_text()


def test_the_handler_of_the_page_streams(tmp_path: Path) -> None:
    (tmp_path / "handler.py").write_text(next(block for language, block in BLOCKS if language == "python"))
    with Trial("--model", str(EXAMPLE), "--handler", str(tmp_path / "handler.py")) as function:
        answer = function.post("/", json.dumps({"prompt": "This function returns"}))
    assert answer.headers["Content-Type"].startswith("text/event-stream")
    assert answer.text.endswith("data: [DONE]\n\n")


def test_a_function_is_tested_as_the_page_about_handlers_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, batched, _, test = (block for language, block in blocks("handler.md") if language == "python")
    exec(compile(batched, "handler.md", "exec"), {})
    (tmp_path / "handler.py").write_text(function)
    monkeypatch.chdir(tmp_path)
    exec(compile(test, "handler.md", "exec"), {})
