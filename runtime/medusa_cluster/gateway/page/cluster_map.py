"""The picture of the nodes, with the instances on each, the use of its link, and the transfers to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from .form import Palette, number, percent, text

_MOST_NODES = 24  # more could not be told apart
_MOST_IN_ROWS = 10
_RADIUS, _RING, _BEND = 22.0, 27.0, 24.0
_WIDTH = 440.0
_DOTS = 9  # a node with more instances shows their number instead of dots

Status = Mapping[str, Any]


class _Point(NamedTuple):
    x: float
    y: float


class _Place(NamedTuple):
    """A node's place in the picture, and the direction of its name, away from the other nodes."""

    x: float
    y: float
    out_x: float = 0.0
    out_y: float = 0.0


def cluster_map(status: Status, palette: Palette) -> str:
    """Return the picture as SVG, or an empty string if there are no nodes or too many."""
    nodes: Sequence[Status] = status.get("nodes") or ()
    if not 0 < len(nodes) <= _MOST_NODES:
        return ""
    places, width, height = _places([str(node.get("name")) for node in nodes])
    centre = _Point(width / 2, height / 2)
    hops = _hops(status)
    outside = {source for _, source, target, _ in hops if source not in places and target in places}
    known: dict[str, _Point | _Place] = {**places, **dict.fromkeys(outside, centre)}
    edges = "".join(_edge(known, centre, hop, palette) for hop in hops if hop[1] in known and hop[2] in known)
    store = _store(centre) if outside else ""
    drawn = "".join(_node(node, places[str(node.get("name"))], palette) for node in nodes)
    return (
        f'<svg class="map" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="The nodes and what travels '
        f'between them"><defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6" '
        f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="context-stroke"/></marker></defs>'
        f"{edges}{store}{drawn}</svg>"
    )


def _places(names: Sequence[str]) -> tuple[dict[str, _Place], float, float]:
    """Place the nodes clockwise, in two rows or, if there are many, on an ellipse.

    Returns the places by name, and the picture's width and height.
    """
    if len(names) > _MOST_IN_ROWS:
        return _on_ellipse(names), 620.0, 500.0
    columns = max(-(-len(names) // 2), 2) if len(names) > 3 else len(names)
    step = _WIDTH / columns
    rows = 1 if len(names) <= columns else 2
    places = {}
    for rank, name in enumerate(names):
        row, column = divmod(rank, columns)
        column = column if row == 0 else columns - 1 - column
        y = 65.0 + 150.0 * row
        places[name] = _Place(step * (column + 0.5), y, 0.0, -1.0 if row == 0 else 1.0)
    return places, _WIDTH, 110.0 if rows == 1 else 290.0


def _on_ellipse(names: Sequence[str]) -> dict[str, _Place]:
    places = {}
    for rank, name in enumerate(names):
        angle = math.pi + 2 * math.pi * rank / len(names)
        out = _Point(math.cos(angle), math.sin(angle))
        places[name] = _Place(310 + 235 * out.x, 250 + 180 * out.y, out.x, out.y)
    return places


def _hops(status: Status) -> list[tuple[str, str, str, float]]:
    """Return the transfers under way as (model's URL, from, to, percent done). -1: the percentage is unknown."""
    found: dict[tuple[str, str, str], float] = {}
    for chain in status.get("chains") or ():
        names = [str(name) for name in chain.get("nodes") or ()]
        for source, target in pairwise(names):
            found[(str(chain.get("url")), source, target)] = -1.0
    for transfer in status.get("transfers") or ():
        hop = (str(transfer.get("url")), str(transfer.get("from")), str(transfer.get("to")))
        found[hop] = percent(transfer.get("done_bytes"), transfer.get("total_bytes"))
    return [(*hop, done) for hop, done in found.items()]


def _edge(
    places: Mapping[str, _Point | _Place], centre: _Point, hop: tuple[str, str, str, float], palette: Palette
) -> str:
    """Draw an arrow that bends a little towards the middle."""
    url, source, target, done = hop
    start, end = places[source], places[target]
    middle = _Point((start.x + end.x) / 2, (start.y + end.y) / 2)
    side = _inwards(start, end, centre)
    out = 0.0 if centre in (start, end) else _BEND
    bend = _Point(middle.x + side.x * out, middle.y + side.y * out)
    begin, stop = _towards(start, bend, _RING + 4), _towards(end, bend, _RING + 6)
    label = _Point(middle.x + side.x * (out / 2 + 21), middle.y + side.y * (out / 2 + 13))
    shown = f"{source} to {target}" + (f", {done:.0f} %" if done >= 0 else "")
    done_text = f'<text class="done" x="{label.x:.1f}" y="{label.y + 4:.1f}">{done:.0f} %</text>' if done >= 0 else ""
    return (
        f'<g class="{palette.of(url)}"><path class="hop" marker-end="url(#tip)" d="M{begin.x:.1f} {begin.y:.1f}'
        f'Q{bend.x:.1f} {bend.y:.1f} {stop.x:.1f} {stop.y:.1f}"><title>{text(shown)}</title></path>{done_text}</g>'
    )


def _inwards(start: _Point | _Place, end: _Point | _Place, centre: _Point) -> _Point:
    """Return the direction at right angles to the line from start to end, on the side of the centre."""
    length = math.dist(start[:2], end[:2]) or 1.0
    across = _Point((start.y - end.y) / length, (end.x - start.x) / length)
    inside = (centre.x - start.x) * across.x + (centre.y - start.y) * across.y
    return across if inside >= 0 else _Point(-across.x, -across.y)


def _towards(start: _Point | _Place, end: _Point, distance: float) -> _Point:
    length = math.hypot(end.x - start.x, end.y - start.y) or 1.0
    return _Point(start.x + (end.x - start.x) / length * distance, start.y + (end.y - start.y) / length * distance)


def _store(at: _Point) -> str:
    return (
        f'<g class="store"><rect x="{at.x - 26:g}" y="{at.y - 14:g}" width="52" height="28" rx="7"/>'
        f'<text x="{at.x:g}" y="{at.y + 4:g}">store</text></g>'
    )


def _node(node: Status, at: _Place, palette: Palette) -> str:
    name, state = str(node.get("name")), str(node.get("state"))
    link = number(node.get("link_bytes_per_s"))
    use = max(percent(node.get("egress_bytes_per_s"), link), percent(node.get("ingress_bytes_per_s"), link))
    around = 2 * math.pi * _RING
    circle = f'cx="{at.x:.1f}" cy="{at.y:.1f}" r="{_RING:g}"'
    ring = f'<circle class="track" {circle}/>'
    if use >= 0.5:
        ring += (
            f'<circle class="ring" {circle} transform="rotate(-90 {at.x:.1f} {at.y:.1f})" '
            f'stroke-dasharray="{around * use / 100:.1f} {around:.1f}"/>'
        )
    instances: Sequence[Status] = node.get("instances") or ()
    name_x, name_y = at.x + at.out_x * (_RING + 8), at.y + at.out_y * (_RING + 13) + 4.5
    anchor = "middle" if abs(at.out_x) < 0.4 else "start" if at.out_x > 0 else "end"
    shown = f"{name}: {state}, {len(instances)} instances, link {use:.0f} % used"
    return (
        f'<g class="node {text(state)}"><title>{text(shown)}</title>'
        f'<circle class="body" cx="{at.x:.1f}" cy="{at.y:.1f}" r="{_RADIUS:g}"/>{ring}{_dots(instances, at, palette)}'
        f'<text text-anchor="{anchor}" x="{name_x:.1f}" y="{name_y:.1f}">'
        f"{text(name if len(name) <= 14 else name[:13] + '…')}</text></g>"
    )


def _dots(instances: Sequence[Status], at: _Place, palette: Palette) -> str:
    """Draw the instances of a node, three in a row."""
    if len(instances) > _DOTS:
        return f'<text class="count" x="{at.x:.1f}" y="{at.y + 5:.1f}">{len(instances)}</text>'
    rows = -(-len(instances) // 3)
    drawn = []
    for place, instance in enumerate(instances):
        row, column = divmod(place, 3)
        wide = min(3, len(instances) - 3 * row)
        x, y = at.x + (column - (wide - 1) / 2) * 12, at.y + (row - (rows - 1) / 2) * 12
        drawn.append(
            f'<circle class="instance {palette.of(instance.get("model"))} {text(instance.get("state"))}" '
            f'cx="{x:.1f}" cy="{y:.1f}" r="4.5"/>'
        )
    return "".join(drawn)
