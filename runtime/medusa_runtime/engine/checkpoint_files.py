"""The small files of a checkpoint that an engine reads."""

from __future__ import annotations

import json
from typing import Any

from ..errors import CorruptError, MismatchError
from ..models import ModelConfig
from ..weights.region import Region


def read_config(region: Region) -> ModelConfig:
    """config.json. Raises MismatchError without one, CorruptError, and what ModelConfig.from_hf raises."""
    raw = _read(region, "config.json")
    if raw is None:
        raise MismatchError("expected a config.json beside the weights, found none")
    return ModelConfig.from_hf(raw)


def read_eos_token_ids(region: Region, config: ModelConfig) -> tuple[int, ...]:
    """The ids in config.json and generation_config.json together: often only one of them has the turn's end."""
    raw = (_read(region, "generation_config.json") or {}).get("eos_token_id")
    found = raw if isinstance(raw, list) else [] if raw is None else [raw]
    if not all(isinstance(token, int) for token in found):
        raise CorruptError(f"generation_config.json: expected eos_token_id to be a token id or a list, found {raw!r}")
    return tuple(sorted({*config.eos_token_ids, *found}))


def _read(region: Region, name: str) -> dict[str, Any] | None:
    data = region.file(name)
    if data is None:
        return None
    try:
        parsed = json.loads(data)
    except ValueError as error:
        raise CorruptError(f"{name}: expected JSON, found: {error}") from None
    if not isinstance(parsed, dict):
        raise CorruptError(f"{name}: expected a JSON object, found {type(parsed).__name__}")
    return parsed
