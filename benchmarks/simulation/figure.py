"""A figure: a chart, and a table with the published and the simulated numbers and a verdict on each.

A simulated number is in band if it is as near to the published one as ``BANDS`` says for its unit. The order of the
systems must always be the published one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from medusa_adapters.report.lines import Series, lines

LESS = "% less"  # a reduction; what remains after it is compared, as a ratio
BANDS = {"s": "within 15 %", "×": "within 20 %", LESS: "what remains within 20 %", "%": "within 8 points"}
_RELATIVE = {"s": 0.15, "×": 0.2, LESS: 0.2}
_POINTS = 8.0


@dataclass(frozen=True)
class Line:
    """One number of a figure.

    ``published`` is the number that the paper prints or plots, or None. A pair is a range.
    """

    what: str
    ours: float
    published: float | tuple[float, float] | None = None
    unit: str = ""

    @property
    def in_band(self) -> bool | None:
        """Whether the number is in the band of its unit; None if nothing was published, or the unit has no band."""
        if self.published is None or self.unit not in BANDS:
            return None
        least, most = self.published if isinstance(self.published, tuple) else (self.published, self.published)
        if self.unit == "%":
            return least - _POINTS <= self.ours <= most + _POINTS
        ours = self.ours
        if self.unit == LESS:
            ours, least, most = 100 - ours, 100 - most, 100 - least
        part = _RELATIVE[self.unit]
        return least * (1 - part) <= ours <= most * (1 + part)


@dataclass(frozen=True)
class Order:
    """Our numbers of systems, in the paper's order from the smallest number to the largest."""

    what: str
    systems: Mapping[str, float]

    @property
    def kept(self) -> bool:
        return all(less <= more for less, more in pairwise(self.systems.values()))


@dataclass(frozen=True)
class Figure:
    """A figure: its chart, and its numbers. ``why`` explains why they differ from the published ones.

    ``by`` says how the numbers were found, as the heading of their column.
    """

    name: str
    title: str
    svg: str
    lines: Sequence[Line]
    why: str
    orders: Sequence[Order] = ()
    by: str = "simulated"

    def table(self) -> str:
        """Return the numbers as a Markdown table."""
        rows = [
            f"| {line.what} | {_shown(line.published)} | {line.ours:.3g} | {line.unit} | {_VERDICTS[line.in_band]} |"
            for line in self.lines
        ]
        for order in self.orders:
            ours = sorted(order.systems, key=order.systems.__getitem__)
            shown = " | ".join(" < ".join(names) for names in (order.systems, ours))
            rows.append(f"| {order.what} | {shown} | | {'kept' if order.kept else '**not kept**'} |")
        head = [f"| what | published | {self.by} | unit | verdict |", "|---|---|---|---|---|"]
        return "\n".join([f"# {self.title}", "", *head, *rows, "", self.verdict(), "", self.why, ""])

    def verdict(self) -> str:
        """Return how many numbers are in band, and how many orders are kept."""
        judged = [line.in_band for line in self.lines if line.in_band is not None]
        found = [f"{sum(judged)} of {len(judged)} in band"] if judged else []
        if self.orders:
            found.append(f"{sum(order.kept for order in self.orders)} of {len(self.orders)} orders kept")
        return ", ".join(found) or "nothing published to compare with"

    def write(self, folder: Path) -> None:
        """Write the chart as SVG and the table as Markdown."""
        (folder / f"{self.name}.svg").write_text(self.svg + "\n")
        (folder / f"{self.name}.md").write_text(self.table())


_VERDICTS = {None: "", True: "in band", False: "**out**"}


def _shown(value: float | tuple[float, float] | None) -> str:
    if isinstance(value, tuple):
        return f"{value[0]:g} to {value[1]:g}"
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
