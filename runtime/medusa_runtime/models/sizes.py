"""The largest sizes in a config.json that any model has. This module needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .fields import Fields

MOST_LAYERS = 10_000  # building the skeleton of a million layers takes minutes
MOST_EXPERTS = 1 << 16  # of all layers; building the skeletons of a million takes minutes
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_MOST = (
    (re.compile(r"(\w+_)?(n_layer|layers)"), MOST_LAYERS),
    (re.compile("|".join(EXPERTS)), MOST_EXPERTS),
    (re.compile("|".join(POSITIONS)), 1 << 27),
    (re.compile(r"num_labels"), 100_000),
    (re.compile(r"image_size"), 8192),  # pixels, of which each may have a position
    (re.compile(r"hidden_size|n_embd|n_embed|d_model|dim|(\w+_)?(head|rotary|embed)_dim"), 1 << 20),
)


def check_sizes(raw: Mapping[str, Any]) -> None:
    """Raise ConfigError for a size in a config.json, also in a part of it, that no model has.

    transformers makes lists and tensors of these sizes before it looks at anything else: gigabytes, for one number.
    """
    parts = [raw]
    while parts:
        part = parts.pop()
        for name, value in part.items():
            if isinstance(value, Mapping):
                parts.append(value)
            most = next((most for names, most in _MOST if names.fullmatch(name)), None)
            if most is not None and type(value) is int and value > most:
                raise Fields(part).error(name, f"at most {most}", value)


__all__ = ["EXPERTS", "MOST_EXPERTS", "MOST_LAYERS", "POSITIONS", "check_sizes"]
