"""The order in which a forward pass touches tensors, read from their names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|h|blk|encoder|decoder)\.(\d+)\.|\.(\d+)\.")
_EMBEDDING = re.compile(
    r"(?:^|[._])(?:embed\w*|\w*embeddings?|wte|wpe|shared|project_in|ln_embed|word_embeddings_layernorm)(?:\.|$)"
)
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|output|head|score|classifier|embed_out)(?:\.|$)")
_FINAL = re.compile(r"(?:^|\.)(?:(?:final\w*|ln_f|ln_out|norm|norm_f|\w*layer_?norm|project_out)\w*)(?:\.|$)")

_EMBED_RANK, _LAYER_RANK, _FINAL_RANK, _HEAD_RANK = range(4)


class _Placed(Protocol):
    @property
    def shard(self) -> int: ...
    @property
    def start(self) -> int: ...


def execution_order(tensors: Mapping[str, _Placed]) -> list[str]:
    """Embeddings, layers by number, final norm, head.

    Inside a layer the file's order is kept, so that ranges stay long. A name that tells nothing follows what stands in
    front of it in the file.
    """
    last = (_EMBED_RANK, 0)
    ranks: list[tuple[tuple[int, int], str]] = []
    for name in sorted(tensors, key=lambda name: (tensors[name].shard, tensors[name].start)):
        last = _rank(name) or last
        ranks.append((last, name))
    ranks.sort(key=lambda item: item[0])
    return [name for _, name in ranks]


def _rank(name: str) -> tuple[int, int] | None:
    layer = _LAYER.search(name)
    if layer:
        return _LAYER_RANK, int(layer[1] or layer[2])
    for pattern, rank in ((_HEAD, _HEAD_RANK), (_EMBEDDING, _EMBED_RANK), (_FINAL, _FINAL_RANK)):
        if pattern.search(name):
            return rank, 0
    return None
