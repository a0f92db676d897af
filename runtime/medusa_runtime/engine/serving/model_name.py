"""The name under which a model is served."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...config import Settings
    from ...region.reader import Region

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_HUB = "hf://"
_NAMELESS = ("", ".", "..", "model", "models", "main")


def small_files(region: Region | None) -> Callable[[str], bytes | None] | None:
    """Return a function that reads a region's small files; None while they have not arrived. Never waits."""
    return region.file if region is not None and region.progress().state in ("fetching", "done") else None


def served_name(settings: Settings, read: Callable[[str], bytes | None] | None = None) -> str:
    """Return the model's name in the OpenAI routes: ``--served-model-name``, or else one derived from its location.

    The derived name is the last part of the path or URL, without secrets. If that part says nothing, such as a folder
    called "model", or if the URL has only a host, it is the name in config.json, which ``read`` reads.
    """
    if settings.served_model_name is not None:
        return settings.served_model_name
    from ...storage.base import redacted, scheme_of  # 5 ms that no first answer of /livez should wait for

    url = redacted(settings.model or "").rstrip("/")
    path = (
        url.partition("://")[2].partition("/")[2] if scheme_of(url) in ("http", "https") else url.rpartition("://")[2]
    )
    parts = [part for part in path.split("/") if part]
    if parts and parts[-1].endswith(_WEIGHTS):
        parts[-1:] = [] if len(parts) > 1 else [parts[-1].rpartition(".")[0]]
    if parts and parts[-1] not in _NAMELESS:
        return parts[-1]
    return _name_in(read) or (parts or ["model"])[-1]


def accepted_names(settings: Settings, read: Callable[[str], bytes | None] | None = None) -> tuple[str, ...]:
    """Return the names by which requests may ask for the model. The first is the one in answers.

    The last is its name on the Hub, if it is from there: clients of other servers send that.
    """
    location = settings.model or ""
    hub_name = location.removeprefix(_HUB).partition("@")[0] if location.startswith(_HUB) else ""
    # A name made from the location is known before config.json is there, and stays valid when that gives another one.
    names = (served_name(settings, read), served_name(settings), hub_name)
    return tuple(dict.fromkeys(filter(None, names)))


def _name_in(read: Callable[[str], bytes | None] | None) -> str | None:
    """Return the name in config.json: that of the checkpoint it was saved from, or the type of its model."""
    try:
        config = json.loads((read and read("config.json")) or b"{}")
    except (ValueError, RecursionError):
        return None
    names = [config.get("_name_or_path"), config.get("model_type")] if isinstance(config, dict) else []
    found = [name.rstrip("/").rpartition("/")[2] for name in names if isinstance(name, str)]
    return next((name for name in found if name and name not in _NAMELESS), None)
