"""The origins of web pages that ``--cors-origins`` lists."""

from __future__ import annotations


def listed_origins(text: str) -> frozenset[str]:
    """Return the origins of a list with commas; ``*`` stands for all of them."""
    return frozenset(origin.strip().rstrip("/") for origin in text.split(","))
