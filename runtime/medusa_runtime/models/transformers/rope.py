"""A longrope with the same frequencies for all sequences.

transformers uses the factors for long sequences in each forward that has a position behind the original ones. Here, a
forward has tokens of many sequences, so that short ones would be computed otherwise than alone. The first part of a
long prompt would also leave keys in the cache that do not fit those behind them.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

logger = logging.getLogger(__name__)


def fix_factors(own: Any, longest: int) -> None:
    """Let a longrope in transformers' configuration have the factors for sequences of ``longest`` tokens at all times.

    vLLM and llama.cpp choose the factors in this way, too.
    """
    given = copy.deepcopy(getattr(own, "rope_parameters", None) or {})
    for rope in (given, *given.values()):  # a value may be the rope of one kind of layers
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            original = rope["original_max_position_embeddings"]
            chosen = "long" if longest > original else "short"
            for name in ("factor", "mscale"):
                if f"{chosen}_{name}" in rope:
                    rope[f"short_{name}"] = rope[f"long_{name}"] = rope[f"{chosen}_{name}"]
            own.rope_parameters = given
            logger.info(
                "sequences may have %d tokens, so the %s factors of the rope are used; it was trained with %d",
                longest,
                chosen,
                original,
            )


__all__ = ["fix_factors"]
