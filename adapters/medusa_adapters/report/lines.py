"""Line charts as SVG: one colour and one name at its end for each series."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

_WIDTH, _HEIGHT = 520, 280  # not wider, so that texts are large enough on a phone
_LEFT, _RIGHT, _TOP, _BOTTOM = 48, 120, 30, 46
_LINE = 14.0  # the height of a label
_COLOURS = ("#0b7a75", "#c2410c", "#5b6ee1", "#a16207", "#9d3c8b", "#616b76", "#15803d", "#b4bec9")

Series = Mapping[str, Sequence[tuple[float, float]]]


def lines(series: Series, x: str, y: str, *, top: float | None = None) -> str:
    """Draw points, joined in the given order. ``top`` ends the y axis. Both axes begin at zero, or at the least x."""
    points = [point for row in series.values() for point in row]
    if not points:
        return ""
    left, right = min(point[0] for point in points), max(point[0] for point in points)
    left = 0.0 if left >= 0 and (right == left or left < right / 4) else left
    right = right if right > left else left + 1
    high = top or _nice(max(point[1] for point in points))

    def at(point: tuple[float, float]) -> tuple[float, float]:
        across = _LEFT + (point[0] - left) / (right - left) * (_WIDTH - _LEFT - _RIGHT)
        return across, _HEIGHT - _BOTTOM - min(point[1] / high, 1.0) * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(y)} over {escape(x)}" '
        'style="font:13px system-ui,sans-serif;width:100%;max-width:680px;height:auto" fill="currentColor">'
    ]
    for step in range(5):
        level = at((left, high * step / 4))[1]
        parts.append(f'<path d="M{_LEFT} {level:.1f}H{_WIDTH - _RIGHT}" stroke="currentColor" opacity=".15"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{level + 4:.1f}" text-anchor="end">{high * step / 4:.3g}</text>')
        value = left + (right - left) * step / 4
        across = at((value, 0))[0]
        parts.append(f'<text x="{across:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="middle">{value:.3g}</text>')
    parts.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x)}</text>')
    parts.append(f'<text x="4" y="{_TOP - 16}">{escape(y)}</text>')
    ends = _apart([at(row[-1])[1] for row in series.values() if row])
    for number, ((name, row), end) in enumerate(
        zip(((name, row) for name, row in series.items() if row), ends, strict=True)
    ):
        colour = _COLOURS[number % len(_COLOURS)]
        path = "L".join(f"{across:.1f} {down:.1f}" for across, down in map(at, row))
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(row) <= 12:
            parts += [f'<circle cx="{a:.1f}" cy="{d:.1f}" r="3" fill="{colour}"/>' for a, d in map(at, row)]
        parts.append(f'<text x="{_WIDTH - _RIGHT + 8}" y="{end + 4:.1f}" fill="{colour}">{escape(name)}</text>')
    return "".join([*parts, "</svg>"])


def _nice(value: float) -> float:
    """Round up to one, two or five times a power of ten."""
    if value <= 0:
        return 1.0
    power = 10 ** math.floor(math.log10(value))
    return float(next(step * power for step in (1, 2, 4, 5, 8, 10) if step * power >= value))


def _apart(heights: Sequence[float]) -> list[float]:
    """Move labels apart so that none covers another."""
    order = sorted(range(len(heights)), key=lambda number: heights[number])
    placed = list(heights)
    last = -math.inf
    for number in order:
        placed[number] = max(placed[number], last + _LINE)
        last = placed[number]
    return placed
