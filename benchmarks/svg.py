"""Charts as SVG for documents and figures. Their colours come from the style sheet of the page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from medusa_adapters.bench.result import Row
from medusa_adapters.report.gantt import MS, Track, gaps, tracks
from medusa_runtime.timeline import Stage, moment, window

_WIDTH = 920
_LABELS = 170
_VALUES = 90
_ROW = 22
_BAR = 14
STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1b1f24;--soft:#616b76;--line:#e3e7eb;--ours:#0b7a75;--other:#b4bec9;
--gap:#d9483b;--token:#c2410c}
@media(prefers-color-scheme:dark){:root{--back:#14171a;--text:#e8ebee;--soft:#98a3ae;--line:#2a3037;--ours:#35b8ae;
--other:#4b5661;--gap:#ff7a6b;--token:#fb923c}}
svg{display:block;width:100%;height:auto;font-size:12px;overflow:visible}
svg text{fill:var(--text)}svg .end{text-anchor:end}svg .tick{text-anchor:middle}
svg .tick,svg .value{fill:var(--soft);font-variant-numeric:tabular-nums}svg .strong{font-weight:600}
.ours,.stage{fill:var(--ours)}.other{fill:var(--other)}.mark{fill:var(--text)}
.range{stroke:var(--text);stroke-width:1.2;fill:none;opacity:.75}.grid,.rule{stroke:var(--line);fill:none}
.gap{fill:var(--gap);opacity:.22}.token{stroke:var(--token);stroke-width:1.5;fill:none}
"""


def bars(rows: Sequence[Row], ours: str) -> str:
    """Draw medians as horizontal bars from zero, with a thin line from the least to the greatest value."""
    top = max(row.max for row in rows) or 1.0
    room = _WIDTH - _LABELS - _VALUES
    height = len(rows) * (_ROW + 8) + 8
    parts = [_open(height, "Medians as bars, the range of the runs as lines")]
    for number, row in enumerate(rows):
        y = number * (_ROW + 8) + 8
        middle = y + _BAR / 2 + 2
        kind = "ours" if row.name == ours else "other"
        width, low, high = (value / top * room for value in (row.median, row.min, row.max))
        parts.append(_text(_LABELS - 12, middle + 4, row.name, "label end" + (" strong" if kind == "ours" else "")))
        parts.append(
            f'<rect class="{kind}" x="{_LABELS}" y="{y}" width="{max(width, 1):.1f}" height="{_BAR + 4}" rx="2"/>'
        )
        parts.append(
            f'<path class="range" d="M{_LABELS + low:.1f} {middle}H{_LABELS + high:.1f}'
            f'M{_LABELS + low:.1f} {middle - 4}v8M{_LABELS + high:.1f} {middle - 4}v8"/>'
        )
        parts.append(_text(_LABELS + high + 8, middle + 4, f"{_value(row.median)} {row.unit}", "value"))
    return "".join([*parts, "</svg>"])


def gantt(stages: Sequence[Stage]) -> str:
    """Draw a start's stages by process. Times without a stage are shaded, and the first token is a vertical line."""
    start, end = window(stages)
    rows = tracks(stages)
    room = _WIDTH - _LABELS - _VALUES

    def x(at: int) -> float:
        return _LABELS + min((at - start) / max(end - start, 1), 1.0) * room

    body, y, process = [], 34, ""
    for row in rows:
        if row.process != process:
            process = row.process
            y += 6
            body.append(_text(0, y + 12, process, "label strong"))
            body.append(f'<path class="rule" d="M0 {y - 3}H{_WIDTH}"/>')
        body.append(_track(row, y, x, start))
        y += _ROW
    parts = [_open(y + 8, "Stages of the cold start by process, in milliseconds"), _axis(end - start, y, room)]
    for begin, stop in gaps(stages):
        if stop <= end:
            width = max(x(stop) - x(begin), 1)
            title = f"<title>no stage: {(stop - begin) / MS:.1f} ms</title>"
            parts.append(
                f'<rect class="gap" x="{x(begin):.1f}" y="30" width="{width:.1f}" height="{y - 26}">{title}</rect>'
            )
    token = moment(stages, "first_token")
    if token is not None and token <= end:
        parts.append(f'<path class="token" d="M{x(token):.1f} 30V{y + 4}"/>')
    return "".join([*parts, *body, "</svg>"])


def _track(row: Track, y: float, x: object, start: int) -> str:
    assert callable(x)
    name = row.name if row.stages == 1 else f"{row.name} ×{row.stages}"
    parts = [_text(_LABELS - 12, y + 12, name, "label end")]
    last = 0.0
    for begin, finish in row.spans:
        left, right = x(begin), x(finish)
        title = f"<title>{escape(name)}: {(begin - start) / MS:.1f} to {(finish - start) / MS:.1f} ms</title>"
        if begin == finish:
            parts.append(f'<path class="mark" d="M{left:.1f} {y + 3}l5 5l-5 5l-5 -5z">{title}</path>')
        else:
            shape = f'x="{left:.1f}" y="{y + 1}" width="{max(right - left, 1.5):.1f}" height="{_BAR}" rx="2"'
            parts.append(f'<rect class="stage" {shape}>{title}</rect>')
        last = max(right, left + 5)
    shown = f"{row.busy_ns / MS:.0f} ms" if row.busy_ns >= MS else f"{row.busy_ns / MS:.1f} ms" if row.busy_ns else ""
    if shown:
        parts.append(_text(last + 6, y + 12, shown, "value"))
    return "".join(parts)


def _axis(span_ns: int, bottom: float, room: int) -> str:
    step = _step(span_ns / MS)
    parts = []
    at = 0.0
    while at <= span_ns / MS:
        x = _LABELS + at * MS / max(span_ns, 1) * room
        parts.append(f'<path class="grid" d="M{x:.1f} 26V{bottom}"/>')
        parts.append(_text(x, 18, f"{at:g}", "tick"))
        at += step
    return "".join([*parts, _text(_WIDTH, 18, "ms", "value end")])


def _step(span_ms: float) -> float:
    """Return a round step that gives four to ten ticks."""
    step = 1.0
    while span_ms / step > 10:
        step *= 2.5 if str(step).lstrip("0.").startswith("2") else 2.0
    return step


def _open(height: float, title: str) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _value(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
