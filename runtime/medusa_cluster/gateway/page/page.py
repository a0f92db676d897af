"""The page about a cluster, from the controller's status."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

HEADERS: dict[str, str] = {}


def body(status: Mapping[str, Any]) -> str:
    return f"<pre>{escape(repr(dict(status)))}</pre>"


def html(status: Mapping[str, Any], *, refresh: bool) -> str:
    return body(status)
