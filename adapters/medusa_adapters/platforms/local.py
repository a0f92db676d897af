"""No platform: a server as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from medusa_handler.platform import Platform
    from medusa_runtime.config import Settings


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    return {}


def platform(settings: Settings, environ: Mapping[str, str]) -> Platform:
    from medusa_handler.platform import Platform

    return Platform()
