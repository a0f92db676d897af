"""Draws MEDUSA's figures 1, 2, 3, 7, 8 and 9 from our own timeline: ``python -m benchmarks.gpu.figures``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from medusa_runtime.timeline import Stage

from benchmarks.gpu.summary import Results, lines, medians, shapes
from benchmarks.svg import gantt

_WIDTH, _LABELS, _ROW = 920, 210, 26
_COLOURS = {
    "skeleton": "#8c96a3", "weights": "#3b6ea5", "tokenizer": "#b58b3b", "kv_plan": "#6b8f47", "profile": "#c0563f",
    "warm_up": "#d98f5b", "capture": "#a5407a", "restore_graphs": "#2f8f83", "context": "#7a6bb0", "import": "#c9b458",
    "first token": "#444444", "other": "#d5d9de", "eager": "#c0563f", "replay": "#2f8f83", "materialize": "#3b6ea5",
}  # fmt: skip
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:960px;margin:2rem auto;padding:0 1rem;color:#1c2430}
svg{width:100%;height:auto;margin:.5rem 0 1.5rem}text{font-size:12px;fill:#333}.end{text-anchor:end}
.stage{fill:#3b6ea5}.mark{fill:#c0563f}.token{stroke:#c0563f}.grid,.rule{stroke:#ddd;fill:none}.gap{fill:#f3e3dc}
.strong{font-weight:600}.miss{color:#a5261d}pre{background:#f5f6f8;padding:.8rem;overflow:auto}"""


def report(results: Results) -> str:
    parts = ["<h1>MEDUSA on a GPU</h1>", _facts(results)]
    said = lines(results)
    parts.append("<pre>" + escape("\n".join(said)) + "</pre>")
    phased = {shape: runs for shape in shapes(results) if (runs := medians(shape, results))}
    if phased:
        parts += ["<h2>Figures 1 and 8: where the time goes, by strategy</h2>", *_timelines(phased)]
        parts += ["<h2>Figure 2: the loading phase with capture</h2>", _bars(_breakdown(phased, "capture"), "s")]
        parts += ["<h2>Figure 7: the loading phase as a whole</h2>", _bars(_whole(phased, "loading_s"), "s")]
        parts += ["<h2>Figure 7b: up to the first token</h2>", _bars(_whole(phased, "first_token_s"), "s")]
    steps = {shape: results.get(f"{shape} captured", {}).get("steps", {}) for shape in shapes(results)}
    if any(steps.values()):
        parts += ["<h2>Figure 3: a decode step by hand and replayed</h2>", *_steps(steps)]
    offline = {
        shape: {"materialize": found["seconds"]}
        for shape in shapes(results)
        if "seconds" in (found := results.get(f"{shape} materialize", {}))
    }
    if offline:
        parts += ["<h2>Figure 9: the offline phase</h2>", _bars(offline, "s")]
    body = "\n".join(parts)
    return f"<!doctype html><html lang=en><meta charset=utf-8><title>GPU</title><style>{_STYLE}</style>{body}</html>"


def _facts(results: Results) -> str:
    found = {k: v for k, v in results.get("environment", {}).items() if isinstance(v, str | int)}
    return "<p>" + escape(" · ".join(f"{name} {str(value)[:80]}" for name, value in found.items())) + "</p>"


def _timelines(phased: Mapping[str, Mapping[str, Results]]) -> Iterable[str]:
    for shape, runs in phased.items():
        for strategy, run in runs.items():
            stages = [Stage(**stage) for stage in run["stages"]]
            yield f"<h3>{escape(shape)}, {escape(strategy)}: {run['loading_s']:.2f} s</h3>"
            yield gantt(sorted(stages, key=lambda stage: stage.start_ns))


def _breakdown(phased: Mapping[str, Mapping[str, Results]], strategy: str) -> dict[str, dict[str, float]]:
    """The seconds of each kind of stage in the engine. Weights count while any is being applied."""
    found: dict[str, dict[str, float]] = {}
    for shape, runs in phased.items():
        if strategy not in runs:
            continue
        names = {"apply": "weights", "prepare_graphs": "restore_graphs"}
        sums: dict[str, float] = {}
        spans: dict[str, list[tuple[int, int]]] = {}
        for stage in runs[strategy]["stages"]:
            name = names.get(stage["name"], stage["name"])
            if stage["process"] == "engine" and name in _COLOURS:
                spans.setdefault(name, []).append((stage["start_ns"], stage["end_ns"]))
        for name, pieces in spans.items():
            sums[name] = _covered(pieces) / 1e9
        found[shape] = sums
    return found


def _covered(spans: list[tuple[int, int]]) -> int:
    total, reached = 0, 0
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total


def _whole(phased: Mapping[str, Mapping[str, Results]], field: str) -> dict[str, dict[str, float]]:
    return {
        f"{shape}, {strategy}": {{"capture": "capture", "async": "warm_up"}.get(strategy, "restore_graphs"): run[field]}
        for shape, runs in phased.items()
        for strategy, run in runs.items()
    }


def _steps(steps: Mapping[str, Mapping[str, Any]]) -> Iterable[str]:
    for shape, sizes in steps.items():
        if not sizes:
            continue
        yield f"<h3>{escape(shape)}</h3>"
        rows = {}
        for size, step in sizes.items():
            rows[f"batch {size}, by hand"] = {"eager": step["eager_ms"]}
            rows[f"batch {size}, replayed"] = {"replay": step["replay_ms"]}
        yield _bars(rows, "ms")


def _bars(rows: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """One bar a row, its parts side by side from zero."""
    top = max((sum(row.values()) for row in rows.values()), default=1.0) or 1.0
    room = _WIDTH - _LABELS - 90
    used = list(dict.fromkeys(name for row in rows.values() for name in row))
    height = len(rows) * _ROW + 34
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img">']
    for number, name in enumerate(used):
        left = _LABELS + number * 120
        parts.append(f'<rect x="{left}" y="2" width="10" height="10" fill="{_COLOURS.get(name, "#888")}"/>')
        parts.append(f'<text x="{left + 14}" y="11">{escape(name)}</text>')
    for number, (label, row) in enumerate(rows.items()):
        y, x = number * _ROW + 24, float(_LABELS)
        parts.append(f'<text class="end" x="{_LABELS - 10}" y="{y + 13}">{escape(label)}</text>')
        for name, value in row.items():
            width: float = max(value / top * room, 0.5)
            title = f"<title>{escape(name)}: {value:.3g} {unit}</title>"
            colour = _COLOURS.get(name, "#888")
            parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="18" fill="{colour}">{title}</rect>')
            x += width
        parts.append(f'<text x="{x + 8:.1f}" y="{y + 13}">{sum(row.values()):.3g} {unit}</text>')
    return "".join([*parts, "</svg>"])


if __name__ == "__main__":
    source = Path(sys.argv[1])
    (source / "report.html").write_text(report(json.loads((source / "results.json").read_text())))
