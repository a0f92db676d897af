"""The cluster's events on a time line, with a row for each model and one for the nodes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from .form import Palette, duration, number, text

_MOST_EVENTS, _MOST_ROWS, _LISTED = 200, 10, 12
_SHORTEST_S, _LONGEST_S = 60.0, 1800.0
_ROW, _TOP, _AXIS = 36, 4, 18
# An event whose kind contains one of these words gets this mark.
_MARKS = (
    (("lost", "fail", "died", "wrong"), "bad"),
    (("up", "start", "ready", "join", "back", "come", "gateway", "deployed"), "up"),
    (("down", "drain", "remove", "end", "stop"), "down"),
)

Status = Mapping[str, Any]


def time_line(status: Status, palette: Palette) -> str:
    """Return the events of the last half an hour as marks, and the last 12 events as a list. Empty without events."""
    events: Sequence[Status] = (status.get("events") or ())[-_MOST_EVENTS:]
    if not events:
        return ""
    now = number(status.get("at")) or time.time()
    oldest = min(number(event.get("at")) for event in events)
    span = min(max((now - oldest) * 1.03, _SHORTEST_S), _LONGEST_S)
    rows = list(dict.fromkeys(str(event.get("model") or "nodes") for event in events))[-_MOST_ROWS:]
    height = _TOP + _ROW * len(rows) + _AXIS
    lanes = "".join(_lane(name, _TOP + _ROW * place, palette) for place, name in enumerate(rows))
    marks = "".join(
        _mark(event, (now - number(event.get("at"))) / span, _TOP + _ROW * rows.index(row) + 20, palette)
        for event in events
        if (row := str(event.get("model") or "nodes")) in rows and now - number(event.get("at")) <= span
    )
    ticks = "".join(
        f'<text class="tick" x="{x}%" y="{height - 5}" text-anchor="{anchor}">{label}</text>'
        for x, anchor, label in (
            (0, "start", f"{duration(span)} ago"),
            (50, "middle", f"{duration(span / 2)} ago"),
            (100, "end", "now"),
        )
    )
    listed = "".join(_line(event, now, palette) for event in reversed(events[-_LISTED:]))
    return (
        f'<svg class="time" width="100%" height="{height}" role="img" aria-label="Events of the last {duration(span)}">'
        f'{lanes}{marks}{ticks}</svg><ol class="events">{listed}</ol>'
    )


def _lane(name: str, y: int, palette: Palette) -> str:
    colour = "" if name == "nodes" else palette.of(name)
    return (
        f'<text class="lane" x="0" y="{y + 10}">{text(name if len(name) <= 40 else name[:39] + "…")}</text>'
        f'<line class="axis {colour}" x1="0" x2="100%" y1="{y + 20}" y2="{y + 20}"/>'
    )


def _kind(event: Status) -> str:
    kind = str(event.get("kind"))
    return next((mark for words, mark in _MARKS if any(word in kind for word in words)), "other")


def _mark(event: Status, ago: float, y: int, palette: Palette) -> str:
    """Draw an event's mark. ``ago`` is its place: 0 is now, 1 the left end."""
    x = 0.7 + 98.6 * (1 - min(max(ago, 0.0), 1.0))
    colour = palette.of(event.get("model")) if event.get("model") else ""
    shape = {
        "up": '<path d="M0 -6L6 5L-6 5z"/>',
        "down": '<path d="M0 6L6 -5L-6 -5z"/>',
        "bad": '<path class="cross" d="M-5 -5L5 5M5 -5L-5 5"/>',
    }.get(_kind(event), '<circle r="4"/>')
    title = text(event.get("text") or event.get("kind"))
    return (
        f'<svg x="{x:.2f}%" y="{y}" overflow="visible" class="mark {_kind(event)} {colour}">'
        f"<title>{title}</title>{shape}</svg>"
    )


def _line(event: Status, now: float, palette: Palette) -> str:
    colour = palette.of(event.get("model")) if event.get("model") else ""
    ago = duration(max(now - number(event.get("at")), 0.0))
    label = text(event.get("text") or event.get("kind"))
    return f'<li class="{_kind(event)} {colour}"><time>{ago} ago</time><span>{label}</span></li>'
