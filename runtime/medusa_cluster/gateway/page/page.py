"""The page about a cluster, made from the controller's status. It loads nothing, and can be read without scripts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from . import sections
from .cluster_map import cluster_map
from .form import Palette
from .time_line import time_line


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
            sections.headline(status),
            f'<div class="top"><section class="picture">{picture}</section>{sections.transfers(status, palette)}</div>',
            sections.models(status, palette),
            f"<section><h2>What happened</h2>{happened}</section>" if happened else "",
            sections.nodes(status, palette),
            sections.gateways(status),
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
