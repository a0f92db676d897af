"""The text that the example model learns from: the prose of the running Python's own documentation (PSF licence)."""

from __future__ import annotations

import ast
import inspect
import os
import pydoc_data.topics
import re
from collections.abc import Iterator
from pathlib import Path

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_LEAST_WORDS = 6
_LEAST_LETTERS = 0.80  # the share of letters and spaces in a paragraph that counts as prose


def documents() -> list[str]:
    """Return the prose of each documentation topic and each docstring. Every paragraph occurs only once overall."""
    seen: set[str] = set()
    texts = []
    for source in _sources():
        paragraphs = [p for p in _prose(source) if not (p in seen or seen.add(p))]  # type: ignore[func-returns-value]
        if paragraphs:
            texts.append("\n\n".join(paragraphs))
    return texts


def _sources() -> Iterator[str]:
    yield from pydoc_data.topics.topics.values()
    library = Path(os.__file__).parent
    for path in sorted(library.rglob("*.py")):
        if _SKIPPED.isdisjoint(path.relative_to(library).parts):
            yield from _docstrings(path)


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # lib2to3 and friends ship files that are wrong on purpose
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _prose(text: str) -> Iterator[str]:
    for block in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        paragraph = re.sub(r"\s+", " ", block).strip().replace("::", ":")
        if _is_prose(paragraph):
            yield paragraph


def _is_prose(paragraph: str) -> bool:
    if not (paragraph.isascii() and paragraph[:1].isupper() and paragraph[-1:] in ".:!?)"):
        return False
    if any(mark in paragraph for mark in (">>>", "...", " = ", "----", "====", "****", "|", "->")):
        return False
    plain = sum(c.isalpha() or c == " " for c in paragraph)
    return len(paragraph.split()) >= _LEAST_WORDS and plain / len(paragraph) >= _LEAST_LETTERS
