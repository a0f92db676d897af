"""A figure: its chart, and a table with the published numbers beside the simulated ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from medusa_adapters.report.lines import Series, lines


@dataclass(frozen=True)
class Line:
    """One number of a figure. ``published``: as the paper prints or plots it, if it does."""

    what: str
    ours: float
    published: float | None = None
    unit: str = ""


@dataclass(frozen=True)
class Figure:
    """``why``: what makes these numbers differ from the published ones. ``found``: how they were found."""

    name: str
    title: str
    svg: str
    lines: Sequence[Line]
    why: str
    found: str = "simulated"

    def table(self) -> str:
        """The numbers as Markdown."""
        rows = [f"| {line.what} | {_shown(line.published)} | {line.ours:.3g} | {line.unit} |" for line in self.lines]
        head = [f"| what | published | {self.found} | unit |", "|---|---|---|---|"]
        return "\n".join([f"# {self.title}", "", *head, *rows, "", self.why, ""])

    def write(self, folder: Path) -> None:
        """Write the chart as SVG and the table as Markdown."""
        (folder / f"{self.name}.svg").write_text(self.svg + "\n")
        (folder / f"{self.name}.md").write_text(self.table())

    def worst(self) -> float:
        """Return the largest deviation of a number that was published: ours over theirs, or the reverse, less one."""
        ratios = [line.ours / line.published for line in self.lines if line.published and line.ours > 0]
        return max((max(ratio, 1 / ratio) - 1 for ratio in ratios), default=0.0)


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def chart(series: Series, x: str, y: str, top: float | None = None) -> str:
    return lines(series, x, y, top=top).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def bars(values: dict[str, float], unit: str) -> str:
    """Draw named values as horizontal bars."""
    most = max(values.values()) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 720 {len(values) * 26 + 10}" '
        'style="font:12px system-ui,sans-serif" fill="currentColor">'
    ]
    for number, (name, value) in enumerate(values.items()):
        down = number * 26 + 8
        parts.append(f'<text x="232" y="{down + 13}" text-anchor="end">{name}</text>')
        parts.append(f'<rect x="240" y="{down}" width="{max(value / most * 380, 1):.1f}" height="18" fill="#0b7a75"/>')
        parts.append(f'<text x="{248 + value / most * 380:.1f}" y="{down + 13}">{value:.3g} {unit}</text>')
    return "".join([*parts, "</svg>"])
