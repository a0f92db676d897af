"""How quantities and names are written on the page."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from html import escape
from typing import Any

_LARGEST = 1e18
COLOURS = 8  # of models, in the style sheet


def text(value: Any) -> str:
    """Anything as HTML text, of characters that can be sent: JSON may name half of a surrogate pair."""
    return escape(str(value).encode("utf-8", "replace").decode())


def number(value: Any) -> float:
    """A number from the status; 0 for what is none, or is larger than anything that can be counted."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known and -_LARGEST < value < _LARGEST else 0.0


def size(count: Any) -> str:
    """Bytes, in units of a thousand."""
    value = number(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 999.5 or unit == "TB":
            break
        value /= 1000
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"


def duration(seconds: Any) -> str:
    value = number(seconds)
    if value < 9.95:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.0f} h" if value < 48 * 3600 else f"{value / 86400:.0f} d"


def short(url: Any) -> str:
    """A model's URL as its last part."""
    return str(url).rstrip("/").rpartition("/")[2] or str(url)


def percent(part: Any, whole: Any) -> float:
    """0 to 100."""
    total = number(whole)
    return 0.0 if total <= 0 else min(max(number(part) / total * 100, 0.0), 100.0)


class Palette:
    """A colour for each model, the same for its name and its URL."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._known: dict[str, int] = {}
        for place, model in enumerate(status.get("models") or ()):
            for name in (model.get("name"), model.get("url")):
                self._known.setdefault(str(name), place % COLOURS)

    def of(self, model: Any) -> str:
        """The class of its colour."""
        name = str(model)
        place = self._known.get(name)
        if place is None:
            place = hashlib.sha256(name.encode("utf-8", "replace")).digest()[0] % COLOURS
        return f"c{place}"


def bar(part: float, title: str) -> str:
    """A bar that is filled to ``part`` percent."""
    return (
        f'<span class="bar" role="img" aria-label="{text(title)}" title="{text(title)}">'
        f'<i class="fill" style="width:{part:.1f}%"></i></span>'
    )
