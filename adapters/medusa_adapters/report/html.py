"""A benchmark of cold starts as one self-contained page: charts, tables, no script, nothing to load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from medusa_runtime.timeline import Stage, moment, window

from ..bench.coldstart.metrics import METRICS, Metric
from ..bench.result import Result, Row
from .charts import bars, timeline
from .gantt import MS, gaps, tracks
from .labels import OURS, Label, Labels

_CHARTED = ("ttft_s", "tokens_per_s_b1", "tokens_per_s_b8")


def html(
    result: Result,
    stages: Sequence[Stage],
    ours: str,
    subject: Mapping[str, str] | None = None,
    labels: Labels = OURS,
) -> str:
    """Return the page. ``stages`` are those of our run with the median TTFT; ``subject`` says what was measured."""
    sections = [
        _headline(result, ours, subject or {}, labels),
        *_charts(result, ours, labels),
        _yardsticks(result, labels),
        _timeline(stages) if stages else "",
        _rows(result, labels),
        _facts("What was measured", subject or {}),
        _facts("Machine", result.machine),
    ]
    body = "\n".join(section for section in sections if section)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>medusa-runtime: cold start</title><style>{STYLE}</style></head>
<body><main>
{body}
</main></body></html>
"""


def _headline(result: Result, ours: str, subject: Mapping[str, str], labels: Labels) -> str:
    median = result.median(ours, "ttft_s")
    if median is None:
        return "<h1>medusa-runtime</h1>"
    ratios = [
        f"<strong>{max(ratio, 1 / ratio):.1f}×</strong> {'faster' if ratio >= 1 else 'slower'} than "
        f"{escape(_label(labels, row).name)}"
        for row in result.rows
        if row.metric == "ttft_s"
        and row.name != ours
        and not _label(labels, row).yardstick
        and (ratio := result.ratio("ttft_s", row.name, ours))
    ]
    versus = f'<p class="versus">{", ".join(ratios)}</p>' if ratios else ""
    about = " · ".join(["cold start", *(escape(subject[key]) for key in ("model", "date") if key in subject)])
    return (
        f"<header><p class='kicker'>medusa-runtime · {about}</p>"
        f"<h1>{median:.2f} s <span>from nothing running to the first token</span></h1>{versus}"
        "<p class='lead'>A model that is used now and then should cost nothing while it is idle. Then its process is "
        "gone, and the next request must start it: Python, libraries, weights. That is a cold start, and this page "
        "shows how long one takes, on one machine, for the same model and prompt.</p></header>"
    )


def _charts(result: Result, ours: str, labels: Labels) -> list[str]:
    sections = []
    for metric in _CHARTED:
        rows = [row for row in result.rows if row.metric == metric and not _label(labels, row).yardstick]
        if rows:
            title, text = METRICS[metric].title, METRICS[metric].meaning
            runs = f"Medians of {rows[0].runs} runs, taken in turn; the thin lines go from the least to the most"
            text = text[0].upper() + text[1:]
            chart = bars(rows, labels, ours) + _meanings(rows, labels)
            sections.append(f"<section><h2>{title}</h2><p>{text}. {runs}.</p>{chart}</section>")
    return sections


def _yardsticks(result: Result, labels: Labels) -> str:
    rows = [row for row in result.rows if row.metric == "ttft_s" and _label(labels, row).yardstick]
    if not rows:
        return ""
    return (
        "<section><h2>For comparison: work without an answer</h2><p>These scripts produce no token. They show how long "
        f"parts of a start take by themselves on this machine.</p>{bars(rows, labels, '')}{_meanings(rows, labels)}"
        "</section>"
    )


def _label(labels: Labels, row: Row) -> Label:
    return labels.get(row.name, Label(row.name))


def _meanings(rows: Sequence[Row], labels: Labels) -> str:
    found = [_label(labels, row) for row in rows]
    return "".join(
        f"<p class='note'><b>{escape(label.name)}</b>: {_prose(label.meaning)}</p>" for label in found if label.meaning
    )


def _prose(text: str) -> str:
    pieces = escape(text).split("`")
    return "".join(f"<code>{piece}</code>" if number % 2 else piece for number, piece in enumerate(pieces))


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
        f"<section><h2>Where the time went</h2><p>The run of medusa-runtime with the median time, {_width(stages)} ms "
        f"from left to right. Each line is a stage of the start, in the process that did it; stages above each other "
        f"ran at the same time. {reached}"
        f"{total:.0f} ms lie in no stage (shaded), {longest:.0f} ms at most in one piece.</p>{timeline(stages)}"
        "<details><summary>Stages as a table</summary><table class='stages'><thead><tr><th>process</th><th>stage</th>"
        f"<th>start, ms</th><th>end, ms</th><th>busy, ms</th></tr></thead><tbody>{lines}</tbody></table></details>"
        "</section>"
    )


def _width(stages: Sequence[Stage]) -> str:
    start, end = window(stages)
    return f"{(end - start) / MS:.0f}"


def _rows(result: Result, labels: Labels) -> str:
    lines = "".join(
        f"<tr><td>{_named(row, labels)}</td><td>{_metric(row, labels)}</td>"
        f"<td>{_number(row.median)} {escape(row.unit)}<small>{_number(row.min)} to {_number(row.max)}, "
        f"{row.runs} run{'s' * (row.runs != 1)}</small></td></tr>"
        for row in result.rows
    )
    return (
        "<section><h2>All numbers</h2><table><thead><tr><th>what</th><th>number</th><th>median</th></tr></thead>"
        f"<tbody>{lines}</tbody></table></section>"
    )


def _named(row: Row, labels: Labels) -> str:
    """Return a row's label, with its name in the command and the JSON."""
    shown = escape(_label(labels, row).name)
    return f"{shown}<small><code>{escape(row.name)}</code></small>" if row.name in labels else shown


def _metric(row: Row, labels: Labels) -> str:
    if _label(labels, row).yardstick and row.metric == "ttft_s":
        return "Time until done<small>it produces no token</small>"
    _, title, meaning = METRICS.get(row.metric, Metric(row.unit, row.metric))
    return f"{escape(title)}<small>{escape(meaning)}</small>"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def _facts(title: str, facts: Mapping[str, object]) -> str:
    if not facts:
        return ""
    lines = "".join(
        f"<dt>{escape(key.replace('_', ' '))}</dt><dd>{escape(str(value))}</dd>" for key, value in facts.items()
    )
    return f"<section><h2>{title}</h2><dl>{lines}</dl></section>"


STYLE = """
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
.lead{margin:14px 0 0;max-width:46em}.note{margin:8px 0 0;font-size:13px;color:var(--soft)}.note b{color:var(--text)}
.row{display:grid;grid-template-columns:minmax(90px,22%) 1fr 76px;gap:10px;align-items:center;
margin:5px 0;font-size:13px}
.label{text-align:right;overflow-wrap:anywhere;line-height:1.2}.ours .label{font-weight:600}
.value{color:var(--soft);font-variant-numeric:tabular-nums;white-space:nowrap}
.lane{position:relative;display:block;height:18px}.lane i{position:absolute;top:0;bottom:0;display:block}
.bar{left:0;background:var(--other);border-radius:2px;min-width:1px}.ours .bar{background:var(--ours)}
.range{margin:auto 0;height:1px;background:var(--text);opacity:.75}
.timeline .row{margin:0}.timeline .lane{height:20px}.process{margin:8px 0 2px;font-weight:600;font-size:13px;
border-top:1px solid var(--line);padding-top:6px}
.lane .stage{background:var(--ours);top:3px;bottom:3px;border-radius:2px;min-width:1.5px}
.lane .gap{background:var(--gap);opacity:.22}.lane .token{width:1.5px;background:var(--token)}
.lane .mark{width:8px;height:8px;margin:6px 0 0 -4px;background:var(--text);transform:rotate(45deg);bottom:auto}
table{width:100%;border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:6px 10px 6px 0;border-bottom:1px solid var(--line);text-align:left;
vertical-align:top;overflow-wrap:anywhere}
th{font-weight:500;color:var(--soft)}td:nth-child(n+3),th:nth-child(n+3){text-align:right}
small{display:block;color:var(--soft);font-size:12px}
code{font-size:12px;color:var(--soft)}
details{margin-top:14px}summary{cursor:pointer;color:var(--soft)}
.wide{overflow-x:auto}.numbers td:first-child{overflow-wrap:normal}
.numbers td:nth-child(n+2),.numbers th:nth-child(n+2){text-align:right}
dl{display:grid;grid-template-columns:minmax(80px,max-content) 1fr;gap:2px 20px;margin:8px 0 0}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
@media(max-width:640px){.wide>*{min-width:600px}main{padding:24px 14px 48px}h1{font-size:34px}
h1 span{display:block;font-size:17px}
.row{grid-template-columns:84px 1fr 62px;gap:6px;font-size:12px}
td,th{padding-right:6px;font-size:13px}.stages td,.stages th{font-size:12px}}
"""
