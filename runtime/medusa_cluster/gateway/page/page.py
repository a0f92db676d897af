"""The page about a cluster, made from the controller's status. It loads nothing, and can be read without scripts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from .cluster_map import cluster_map
from .form import Palette, bar, duration, number, percent, short, size, text
from .time_line import time_line

_MOST_ROWS = 200

Status = Mapping[str, Any]


def html(status: Mapping[str, Any], *, refresh: bool) -> str:
    """Return the whole page. With ``refresh``, it fetches its body again every second from the same gateway."""
    script = f"<script>{_asset('refresh.js')}</script>" if refresh else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" '
        'content="light dark"><link rel="icon" href="data:,"><title>medusa cluster</title>'
        f"<style>{_asset('style.css')}</style></head>\n<body><main>{body(status)}</main>{script}</body></html>\n"
    )


def body(status: Mapping[str, Any]) -> str:
    """Return the content of the page, which changes with the status."""
    palette = Palette(status)
    picture = cluster_map(status, palette)
    happened = time_line(status, palette)
    return "\n".join(
        (
            _headline(status),
            f'<div class="top"><section class="picture">{picture}</section>{_transfers(status, palette)}</div>',
            _models(status, palette),
            f"<section><h2>What happened</h2>{happened}</section>" if happened else "",
            _nodes(status, palette),
            _gateways(status),
        )
    )


def headers() -> dict[str, str]:
    """Return the page's headers. A browser may only run the page's own script and call this gateway."""
    digest = base64.b64encode(hashlib.sha256(_asset("refresh.js").encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}


@cache
def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8").strip()


def _headline(status: Status) -> str:
    """Return the cluster's totals in one line, and a warning while the controller is away."""
    nodes: Sequence[Status] = status.get("nodes") or ()
    models: Sequence[Status] = status.get("models") or ()
    alive = sum(node.get("state") != "lost" for node in nodes)
    instances = sum(int(number(model.get("instances"))) for model in models)
    facts = [
        (f"{alive}" if alive == len(nodes) else f"{alive} of {len(nodes)}", "node" if len(nodes) == 1 else "nodes"),
        (str(len(models)), "model" if len(models) == 1 else "models"),
        (str(instances), "instance" if instances == 1 else "instances"),
        (_count(models, "running"), "running"),
        (_count(models, "waiting"), "waiting"),
        (_count(models, "tokens_per_s"), "tokens/s"),
    ]
    shown = "".join(f"<div><dd>{value}</dd><dt>{name}</dt></div>" for value, name in facts)
    away = number(status.get("controller_away_s"))
    warning = ""
    if away >= 1:
        warning = (
            f'<p class="warning">The controller has been away for {duration(away)}. Requests are served over the last '
            "known routes; what is below may be old.</p>"
        )
    return f'<header><h1>Cluster</h1><dl class="facts">{shown}</dl></header>{warning}'


def _count(models: Sequence[Status], name: str) -> str:
    return f"{sum(number(model.get(name)) for model in models):,.0f}"


def _models(status: Status, palette: Palette) -> str:
    found: Sequence[Status] = status.get("models") or ()
    if not found:
        return _section(
            "Models", '<p class="none">None is deployed yet: <code>medusa cluster deploy NAME --model URL</code></p>'
        )
    return _section(
        "Models", f'<div class="cards">{"".join(_model(model, palette) for model in found[:_MOST_ROWS])}</div>'
    )


def _model(model: Status, palette: Palette) -> str:
    ready, starting = int(number(model.get("instances"))), int(number(model.get("starting")))
    most = max(int(number(model.get("max"))), ready + starting)
    slots = "".join(
        f'<i class="{"on" if place < ready else "soon" if place < ready + starting else ""}"></i>'
        for place in range(min(most, 24))
    )
    copies = list(map(str, model.get("copies") or ()))
    where = (
        f"on {', '.join(copies[:4])}" + (f" and {len(copies) - 4} more" if len(copies) > 4 else "") if copies else ""
    )
    slo = [
        f"{name} {number(model[key]) * 1000:,.0f} ms"
        for key, name in (("ttft_slo_s", "TTFT"), ("tpot_slo_s", "TPOT"))
        if model.get(key)
    ]
    rows = [
        ("instances", f"{ready} of {int(number(model.get('min')))} to {int(number(model.get('max')))}"),
        ("copies", f"{len(copies)} {text(where)}"),
        ("load", f"{number(model.get('running')):,.0f} running, {number(model.get('waiting')):,.0f} waiting"),
        ("speed", f"{number(model.get('tokens_per_s')):,.0f} tokens/s"),
    ]
    if slo:
        rows.append(("promised", ", ".join(slo)))
    facts = "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in rows)
    return (
        f'<article class="{palette.of(model.get("name"))}"><h3>{text(model.get("name"))}</h3>'
        f'<p class="url">{text(model.get("engine") or "")} · {text(model.get("url") or "")}</p>'
        f'<p class="slots" role="img" aria-label="{ready} ready, {starting} starting, {most} at most">{slots}</p>'
        f"<dl>{facts}</dl></article>"
    )


def _transfers(status: Status, palette: Palette) -> str:
    found: Sequence[Status] = status.get("transfers") or ()
    chains: Sequence[Status] = status.get("chains") or ()
    if not found and not chains:
        return _section("On its way", '<p class="none">Nothing is being fetched.</p>')
    drawn = "".join(_chain(chain, palette) for chain in chains)
    rows = "".join(_transfer(transfer, palette) for transfer in found[:_MOST_ROWS])
    return _section("On its way", f'<div class="chains">{drawn}</div><div class="rows">{rows}</div>')


def _chain(chain: Status, palette: Palette) -> str:
    """Draw a chain as its nodes with arrows between them."""
    names = [f"<b>{text(name)}</b>" for name in chain.get("nodes") or ()]
    arrow = '<svg width="26" height="10" aria-hidden="true"><path class="hop" d="M1 5H25"/></svg>'
    return (
        f'<p class="chain {palette.of(chain.get("url"))}"><span>{text(short(chain.get("url")))}</span> '
        f"{arrow.join(names)}</p>"
    )


def _transfer(transfer: Status, palette: Palette) -> str:
    done = percent(transfer.get("done_bytes"), transfer.get("total_bytes"))
    left = transfer.get("remaining_s")
    shown = f"{size(transfer.get('done_bytes'))} of {size(transfer.get('total_bytes'))}"
    rest = f"{duration(left)} left" if left is not None else "waiting"
    return (
        f'<div class="row {palette.of(transfer.get("url"))}"><span class="name">{text(transfer.get("from"))} → '
        f"{text(transfer.get('to'))}<small>{text(short(transfer.get('url')))}</small></span>"
        f"{bar(done, f'{done:.0f} %: {shown}')}"
        f'<span class="value">{rest}<small>{size(transfer.get("bytes_per_s"))}/s</small></span></div>'
    )


def _nodes(status: Status, palette: Palette) -> str:
    found: Sequence[Status] = status.get("nodes") or ()
    if not found:
        return _section("Nodes", '<p class="none">The controller knows of no node.</p>')
    now = number(status.get("at"))
    return _section(
        "Nodes", f'<div class="cards">{"".join(_node(node, now, palette) for node in found[:_MOST_ROWS])}</div>'
    )


def _node(node: Status, now: float, palette: Palette) -> str:
    link = node.get("link_bytes_per_s")
    memory = _meter("memory", node.get("memory_used_bytes"), node.get("memory_bytes"), "")
    sends = _meter("sends", node.get("egress_bytes_per_s"), link, "/s")
    receives = _meter("receives", node.get("ingress_bytes_per_s"), link, "/s")
    copies = "".join(_copy(copy, palette) for copy in node.get("models") or ())
    instances = "".join(_instance(instance, now, palette) for instance in node.get("instances") or ())
    state = str(node.get("state"))
    return (
        f'<article class="machine {text(state)}"><h3>{text(node.get("name"))} <em>{text(state)}</em></h3>'
        f'<p class="url">{text(node.get("address") or "")}</p><dl>{memory}{sends}{receives}</dl>'
        f'<p class="chips">{copies}{instances}</p></article>'
    )


def _meter(name: str, part: Any, whole: Any, per: str) -> str:
    shown, most = f"{size(part)}{per}", f"of {size(whole)}{per}"
    filled = bar(percent(part, whole), f"{shown} {most}")
    return f'<div class="meter"><dt>{name}</dt>{filled}<dd>{shown}<small>{most}</small></dd></div>'


def _copy(copy: Status, palette: Palette) -> str:
    done = percent(copy.get("fetched_bytes"), copy.get("total_bytes"))
    partly = "" if copy.get("state") == "done" else f" {done:.0f} %"
    title = f"copy, {copy.get('state')}: {size(copy.get('fetched_bytes'))} of {size(copy.get('total_bytes'))}"
    title += ", pinned" if copy.get("pinned") else ""
    return (
        f'<span class="chip copy {palette.of(copy.get("url"))}" title="{text(title)}" '
        f'style="--done:{done:.0f}%">{text(short(copy.get("url")))}{partly}</span>'
    )


def _instance(instance: Status, now: float, palette: Palette) -> str:
    age = f" {duration(now - number(instance.get('since')))}" if now and instance.get("since") else ""
    state = str(instance.get("state"))
    return (
        f'<span class="chip instance {palette.of(instance.get("model"))} {text(state)}" '
        f'title="{text(instance.get("id"))}"><i></i>{text(instance.get("model"))}'
        f"{'' if state == 'ready' else ' ' + text(state)}{age}</span>"
    )


def _gateways(status: Status) -> str:
    found: Sequence[Status] = status.get("gateways") or ()
    now = number(status.get("at"))
    names = "".join(
        f"<li>{text(gateway.get('name'))} <small>{text(gateway.get('url') or '')}"
        f"{_unseen(now - number(gateway.get('seen')))}</small></li>"
        for gateway in found
    )
    return _section("Gateways", f'<ul class="gateways">{names}</ul>') if names else ""


def _unseen(seconds: float) -> str:
    return f", last seen {duration(seconds)} ago" if seconds > 3 else ""


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>"
