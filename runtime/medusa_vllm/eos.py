"""Finds the tokens that end a text, for a model whose configuration vLLM has read."""

from __future__ import annotations

from typing import Any

from medusa_runtime.errors import CorruptError
from medusa_runtime.models.fields import read_object, token_ids
from medusa_runtime.region.reader import Region


def eos_token_ids(region: Region, config: Any) -> tuple[int, ...]:
    """Return the ids in config.json (or its text part) and in generation_config.json together."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    generation = (read_object(region.file, "generation_config.json") or {}).get("eos_token_id")
    found: set[int] = set()
    for value in (getattr(config, "eos_token_id", None), getattr(text, "eos_token_id", None), generation):
        ids = token_ids(value)
        if ids is None:
            raise CorruptError(f"eos_token_id: expected a token id or a list, found {value!r}")
        found.update(ids)
    return tuple(sorted(found))
