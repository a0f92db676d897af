"""A benchmark of cold starts as one self-contained page: charts, tables, no script, nothing to load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from medusa_runtime.timeline import Stage

from ..bench.result import Result, Row
from .gantt import MS, gaps, moment, tracks, window
from .svg import bars, gantt

if TYPE_CHECKING:
    from ..bench.contestants import Sample

_METRICS = {
    "ttft_s": (
        "Time to the first token",
        "from exec of a fresh process to the first token at the client; less is better",
    ),
    "ready_s": ("Time until ready", "from exec to the first 200 of /readyz"),
    "pss_mb": ("Memory", "proportional set size of all processes after the first answer"),
    "rss_mb": ("Resident sets", "summed over all processes; shared pages count once for each"),
    "gap_ms": ("Unaccounted time", "the longest time before the first token that lies in no stage"),
    "tokens_per_s_b1": ("Throughput at batch 1", "tokens per second; more is better"),
    "tokens_per_s_b8": ("Throughput at batch 8", "tokens per second; more is better"),
    "first_mb": ("Memory of one instance", "proportional set size"),
    "added_mb": ("Memory of a further instance", "what the proportional set sizes grow by"),
    "added_system_mb": ("The same, seen by the machine", "growth of its anonymous and shared memory"),
    "size_mb": ("Size of the weights", ""),
}
_CHARTED = ("ttft_s", "tokens_per_s_b1", "tokens_per_s_b8")


def html(result: Result, samples: Mapping[str, Sequence[Sample]], ours: str) -> str:
    """The page. The timeline shown is that of our run with the median TTFT."""
    sections = [_headline(result, ours), *_charts(result, ours)]
    ordered = sorted(samples.get(ours, ()), key=lambda sample: sample.ttft_s)
    if ordered and (stages := ordered[(len(ordered) - 1) // 2].stages):
        sections.append(_timeline(stages))
    sections += [_rows(result), _machine(result)]
    body = "\n".join(section for section in sections if section)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>medusa-runtime: cold start</title><style>{_STYLE}</style></head>
<body><main>
{body}
</main></body></html>
"""


def _headline(result: Result, ours: str) -> str:
    median = result.median(ours, "ttft_s")
    if median is None:
        return "<h1>medusa-runtime</h1>"
    ratios = [
        f"<strong>{max(ratio, 1 / ratio):.1f}×</strong> {'faster' if ratio >= 1 else 'slower'} than {escape(row.name)}"
        for row in result.rows
        if row.metric == "ttft_s"
        and row.name not in (ours, "torch-import", "floor")
        and (ratio := result.ratio("ttft_s", row.name, ours))
    ]
    versus = f'<p class="versus">{", ".join(ratios)}</p>' if ratios else ""
    return (
        f"<header><p class='kicker'>medusa-runtime · cold start</p>"
        f"<h1>{median:.2f} s <span>from exec to the first token</span></h1>{versus}</header>"
    )


def _charts(result: Result, ours: str) -> list[str]:
    sections = []
    for metric in _CHARTED:
        rows = [row for row in result.rows if row.metric == metric]
        if rows:
            title, text = _METRICS[metric]
            runs = f"Medians of {rows[0].runs} runs, taken in turn; the thin lines go from the least to the most"
            text = text[0].upper() + text[1:]
            sections.append(f"<section><h2>{title}</h2><p>{text}. {runs}.</p>{bars(rows, ours)}</section>")
    return sections


def _timeline(stages: Sequence[Stage]) -> str:
    start, _ = window(stages)
    missing = gaps(stages)
    total = sum(stop - begin for begin, stop in missing) / MS
    longest = max(((stop - begin) / MS for begin, stop in missing), default=0.0)
    token = moment(stages, "first_token")
    reached = f"The first token is the vertical line, at {(token - start) / MS:.0f} ms. " if token is not None else ""
    lines = "".join(
        f"<tr><td>{escape(row.process)}</td><td>{escape(row.name)}</td><td>{(row.start_ns - start) / MS:.1f}</td>"
        f"<td>{(row.spans[-1][1] - start) / MS:.1f}</td><td>{row.busy_ns / MS:.1f}</td></tr>"
        for row in tracks(stages)
    )
    return (
        f"<section><h2>Where the time went</h2><p>The run with the median time. {reached}"
        f"{total:.0f} ms lie in no stage (shaded), {longest:.0f} ms at most in one piece.</p>{gantt(stages)}"
        "<details><summary>Stages as a table</summary><table class='stages'><thead><tr><th>process</th><th>stage</th>"
        f"<th>start, ms</th><th>end, ms</th><th>busy, ms</th></tr></thead><tbody>{lines}</tbody></table></details>"
        "</section>"
    )


def _rows(result: Result) -> str:
    lines = "".join(
        f"<tr><td>{escape(row.name)}</td><td>{_metric(row)}</td>{_numbers(row)}</tr>" for row in result.rows
    )
    return (
        "<section><h2>All numbers</h2><table><thead><tr><th>name</th><th>metric</th><th>median</th><th>min</th>"
        f"<th>max</th><th>unit</th><th>runs</th></tr></thead><tbody>{lines}</tbody></table></section>"
    )


def _metric(row: Row) -> str:
    title, text = _METRICS.get(row.metric, (row.metric, ""))
    return f'<span title="{escape(text)}">{escape(title)}</span> <code>{escape(row.metric)}</code>'


def _numbers(row: Row) -> str:
    cells = "".join(f"<td>{_number(value)}</td>" for value in (row.median, row.min, row.max))
    return f"{cells}<td class='unit'>{escape(row.unit)}</td><td>{row.runs}</td>"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def _machine(result: Result) -> str:
    facts = "".join(f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>" for key, value in result.machine.items())
    return f"<section><h2>Machine</h2><dl>{facts}</dl></section>"


_STYLE = """
:root{color-scheme:light dark;--back:#fff;--text:#1b1f24;--soft:#616b76;--line:#e3e7eb;--ours:#0b7a75;--other:#b4bec9;
--gap:#d9483b;--token:#c2410c}
@media(prefers-color-scheme:dark){:root{--back:#14171a;--text:#e8ebee;--soft:#98a3ae;--line:#2a3037;--ours:#35b8ae;
--other:#4b5661;--gap:#ff7a6b;--token:#fb923c}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--text);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:980px;margin:0 auto;padding:40px 24px 64px}
.kicker{margin:0;color:var(--soft);font-size:13px;letter-spacing:.04em}
h1{margin:.1em 0 0;font-size:44px;line-height:1.15;font-weight:650;font-variant-numeric:tabular-nums}
h1 span{font-size:20px;font-weight:400;color:var(--soft)}
.versus{margin:.4em 0 0;font-size:17px}.versus strong{color:var(--ours)}
h2{margin:0;font-size:19px;font-weight:600}
section{margin-top:40px}section>p{margin:4px 0 14px;color:var(--soft)}
svg{display:block;width:100%;height:auto;font-size:12px;overflow:visible}
svg text{fill:var(--text)}svg .end{text-anchor:end}svg .tick{text-anchor:middle}
svg .tick,svg .value{fill:var(--soft);font-variant-numeric:tabular-nums}svg .strong{font-weight:600}
.ours,.stage{fill:var(--ours)}.other{fill:var(--other)}.mark{fill:var(--text)}
.range{stroke:var(--text);stroke-width:1.2;fill:none;opacity:.75}.grid,.rule{stroke:var(--line);fill:none}
.gap{fill:var(--gap);opacity:.22}.token{stroke:var(--token);stroke-width:1.5;fill:none}
table{width:100%;border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:6px 10px 6px 0;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th{font-weight:500;color:var(--soft)}
th:nth-child(-n+2),td:nth-child(-n+2),.unit{text-align:left}th:nth-child(6):nth-last-child(2){text-align:left}
td:nth-child(2){white-space:normal}
code{font-size:12px;color:var(--soft)}
details{margin-top:14px}summary{cursor:pointer;color:var(--soft)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 20px;margin:8px 0 0}dt{color:var(--soft)}dd{margin:0}
@media(max-width:640px){section{overflow-x:auto}svg{min-width:640px}h1{font-size:34px}}
"""
