"""The timeline of a cold start as a chart in a terminal, and the time that no stage accounts for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from medusa_runtime.timeline import Stage, moment, ready_at, window

MS = 1_000_000
_ORDER = ("supervisor", "prefetcher", "zygote", "engine", "function")
_EIGHTHS = " ▏▎▍▌▋▊▉"
_NARROWEST_BAR = 16


class Track(NamedTuple):
    """All stages of one name in one process: how many, and their times in order, merged where they touch or overlap."""

    process: str
    name: str
    stages: int
    spans: tuple[tuple[int, int], ...]

    @property
    def label(self) -> str:
        """The name and, if there are several, the number of stages."""
        return self.name if self.stages == 1 else f"{self.name} ×{self.stages}"

    @property
    def start_ns(self) -> int:
        return self.spans[0][0]

    @property
    def busy_ns(self) -> int:
        return sum(end - start for start, end in self.spans)


def tracks(stages: Sequence[Stage]) -> list[Track]:
    """Return the start's stages as one track for each process and name: processes in their order, names by start."""
    start, end = window(stages)
    spans: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for stage in stages:
        if start <= stage.start_ns <= end:
            spans.setdefault((stage.process, stage.name), []).append((stage.start_ns, stage.end_ns))
    found = [Track(process, name, len(s), _merge(s)) for (process, name), s in spans.items()]
    return sorted(found, key=lambda track: (_rank(track.process), track.process, track.start_ns, track.spans[-1]))


def gaps(stages: Sequence[Stage]) -> list[tuple[int, int]]:
    """Return the times between the first stage's start and the first token in which no process was in a stage.

    Without a first token, they end with the start (see ``window``). Marks cover no time.
    """
    if not stages:
        return []
    token = moment(stages, "first_token")
    reached, end = min(stage.start_ns for stage in stages), window(stages)[1] if token is None else token
    found = []
    for start, stop in _merge([(stage.start_ns, stage.end_ns) for stage in stages if stage.end_ns > stage.start_ns]):
        if start >= end:
            break
        if start > reached:
            found.append((reached, start))
        reached = max(reached, stop)
    if reached < end:
        found.append((reached, end))
    return found


def largest_gap_ms(stages: Sequence[Stage]) -> float:
    return max(((end - start) / MS for start, end in gaps(stages)), default=0.0)


def render_text(stages: Sequence[Stage], width: int = 100) -> str:
    """Return the chart as lines of at most ``width`` columns (60 at least).

    A stage has its start and duration in ms, and a bar.
    """
    if not stages:
        return "no stages were recorded"
    start, end = window(stages)
    rows = tracks(stages)
    label_width = max(len(row.label) for row in rows) + 2
    bar_width = max(max(width, 60) - label_width - 16, _NARROWEST_BAR)
    lines = [f"{'':{label_width}} {'start':>6} {'ms':>6}  {_axis(bar_width, (end - start) / MS)}"]
    process = None
    for row in rows:
        if row.process != process:
            process = row.process
            lines.append(process)
        times = f"{(row.start_ns - start) / MS:6.0f} {_ms(row.busy_ns):>6}" if row.busy_ns else _at(row, start)
        lines.append(f"  {row.label:{label_width - 2}} {times}  {_bar(row, start, end, bar_width)}".rstrip())
    return "\n".join([*lines, _sums(stages)])


def _merge(spans: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return tuple(merged)


def _rank(process: str) -> int:
    return _ORDER.index(process) if process in _ORDER else len(_ORDER)


def _ms(duration_ns: int) -> str:
    return f"{duration_ns / MS:.1f}" if duration_ns < 10 * MS else f"{duration_ns / MS:.0f}"


def _at(row: Track, start: int) -> str:
    return f"{(row.start_ns - start) / MS:6.0f} {'·':>6}"


def _axis(width: int, total_ms: float) -> str:
    """Return the axis: four ticks and the end. Each number starts at its place; the last one ends there."""
    line = [" "] * width
    for quarter in range(4):
        text = f"{total_ms * quarter / 4:.0f}"
        at = width * quarter // 4
        line[at : at + len(text)] = text
    last = f"{total_ms:.0f} ms"
    line[width - len(last) :] = last
    return "".join(line)[:width]


def _bar(row: Track, start: int, end: int, width: int) -> str:
    """Return a bar: full blocks, a part of a block at a span's end, and a thin line for a short span."""
    scale = width * 8 / max(end - start, 1)
    cells = [" "] * width
    for begin, finish in row.spans:
        first, last = int((begin - start) * scale), int((min(finish, end) - start) * scale)
        first = min(first, width * 8 - 1)
        if row.busy_ns == 0:
            cells[first // 8] = "◆"
            continue
        for cell in range(first // 8, min(last // 8, width - 1) + 1):
            begun, filled = max(first - cell * 8, 0), min(last - cell * 8, 8)
            if filled == 8:
                cells[cell] = "█" if begun < 4 else "▐"
            elif cells[cell] == " ":
                cells[cell] = _EIGHTHS[max(filled, 1)] if begun == 0 else "▏" if begun < 4 else "▐"
    return "".join(cells)


def _sums(stages: Sequence[Stage]) -> str:
    start = min(stage.start_ns for stage in stages)
    parts = []
    for at, text in ((moment(stages, "first_token"), "first token"), (ready_at(stages), "ready")):
        if at is not None and at <= window(stages)[1]:
            parts.append(f"{text} after {(at - start) / MS:.0f} ms")
    missing = [gap for gap in gaps(stages) if gap[1] <= window(stages)[1]]
    total = sum(stop - begin for begin, stop in missing) / MS
    if missing:
        begin, stop = max(missing, key=lambda gap: gap[1] - gap[0])
        parts.append(
            f"{total:.0f} ms in no stage (longest {(stop - begin) / MS:.0f} ms, from {(begin - start) / MS:.0f} ms)"
        )
    else:
        parts.append("every millisecond is in a stage")
    return "; ".join(parts)
