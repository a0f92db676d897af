"""The charts of a report as HTML that fits any width: text wraps and bars shrink, nothing scrolls sideways."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from medusa_runtime.timeline import Stage, moment, window

from ..bench.result import Row
from .gantt import MS, Track, gaps, tracks
from .labels import Labels


def bars(rows: Sequence[Row], labels: Labels, ours: str) -> str:
    """Return horizontal bars of medians, all from zero, with a thin line from the least to the most."""
    top = max(row.max for row in rows) or 1.0
    lines = []
    for row in rows:
        kind = "ours" if row.name == ours else "other"
        width, low, high = (f"{value / top * 100:.2f}%" for value in (row.median, row.min, row.max))
        name = labels[row.name].name if row.name in labels else row.name
        lines.append(
            f'<div class="row {kind}"><span class="label">{escape(name)}</span>'
            f'<span class="lane"><i class="bar" style="width:{width}"></i>'
            f'<i class="range" style="left:{low};width:calc({high} - {low})"></i></span>'
            f'<span class="value">{_value(row.median)} {escape(row.unit)}</span></div>'
        )
    about = "Medians as bars, the range of the runs as lines"
    return f'<div class="chart" role="img" aria-label="{about}">{"".join(lines)}</div>'


def timeline(stages: Sequence[Stage]) -> str:
    """Return the start's stages by process. Time without a stage is shaded; the first token is a line across."""
    start, end = window(stages)
    span = max(end - start, 1)

    def percent(at: int) -> float:
        return min((at - start) / span, 1.0) * 100

    shades = "".join(
        f'<i class="gap" style="left:{percent(begin):.2f}%;width:{max(percent(stop) - percent(begin), 0.1):.2f}%" '
        f'title="no stage: {(stop - begin) / MS:.1f} ms"></i>'
        for begin, stop in gaps(stages)
        if stop <= end
    )
    token = moment(stages, "first_token")
    if token is not None and token <= end:
        shades += f'<i class="token" style="left:{percent(token):.2f}%"></i>'
    lines, process = [], ""
    for track in tracks(stages):
        if track.process != process:
            process = track.process
            lines.append(f'<div class="process">{escape(process)}</div>')
        lines.append(_track(track, shades, start, span))
    return f'<div class="chart timeline" role="img" aria-label="Stages of the start by process">{"".join(lines)}</div>'


def _track(track: Track, shades: str, start: int, span: int) -> str:
    pieces = []
    for begin, finish in track.spans:
        left, width = (begin - start) / span * 100, (finish - begin) / span * 100
        title = f'title="{escape(track.name)}: {(begin - start) / MS:.1f} to {(finish - start) / MS:.1f} ms"'
        if begin == finish:
            pieces.append(f'<i class="mark" style="left:{min(left, 100):.2f}%" {title}></i>')
        else:
            pieces.append(f'<i class="stage" style="left:{left:.2f}%;width:{width:.2f}%" {title}></i>')
    busy = track.busy_ns / MS
    shown = f"{busy:.0f} ms" if busy >= 1 else f"{busy:.1f} ms" if busy else "·"
    return (
        f'<div class="row"><span class="label">{escape(track.label)}</span>'
        f'<span class="lane">{shades}{"".join(pieces)}</span><span class="value">{shown}</span></div>'
    )


def _value(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
