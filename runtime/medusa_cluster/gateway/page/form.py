"""The form of quantities, names and colours on the page."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from html import escape
from typing import Any

_LARGEST = 1e18
COLOURS = 8  # how many colours for models the style sheet has


def text(value: Any) -> str:
    """Return a value as escaped HTML text. Replaces lone surrogates, which JSON can have but UTF-8 cannot."""
    return escape(str(value).encode("utf-8", "replace").decode())


def number(value: Any) -> float:
    """Return a number from the status, or 0 if it is no number or absurdly large."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if known and -_LARGEST < value < _LARGEST else 0.0


def size(count: Any) -> str:
    """Return a number of bytes as text, in decimal units."""
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
    """Return the last part of a model's URL."""
    return str(url).rstrip("/").rpartition("/")[2] or str(url)


def percent(part: Any, whole: Any) -> float:
    """Return a part of a whole in percent, from 0 to 100."""
    total = number(whole)
    return 0.0 if total <= 0 else min(max(number(part) / total * 100, 0.0), 100.0)


class Palette:
    """The models' colours. A model's name and its URL have the same one."""

    def __init__(self, status: Mapping[str, Any]) -> None:
        self._known: dict[str, int] = {}
        for place, model in enumerate(status.get("models") or ()):
            for name in (model.get("name"), model.get("url")):
                self._known.setdefault(str(name), place % COLOURS)

    def of(self, model: Any) -> str:
        """Return the CSS class of the colour for a model's name or URL."""
        name = str(model)
        place = self._known.get(name)
        if place is None:
            place = hashlib.sha256(name.encode("utf-8", "replace")).digest()[0] % COLOURS
        return f"c{place}"


def bar(part: float, title: str) -> str:
    """Draw a bar that is filled to ``part`` percent."""
    return (
        f'<span class="bar" role="img" aria-label="{text(title)}" title="{text(title)}">'
        f'<i class="fill" style="width:{part:.1f}%"></i></span>'
    )
