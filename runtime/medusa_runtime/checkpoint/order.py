"""The order in which a forward pass uses tensors, derived from their names."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Protocol

from .text_names import text_name

_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|h|blk|encoder|decoder)\.([0-9]+)\.|\.([0-9]+)\.")
_EMBEDDING = re.compile(
    r"(?:(?:^|[._])(?:embed\w*+|wte|wpe|shared|project_in|ln_embed|word_embeddings_layernorm)"
    r"|(?:^|[\w.])embeddings?)(?:\.|$)"
)
_HEAD = re.compile(r"(?:^|\.)(?:lm_head|output|head|score|classifier|embed_out|fc|pooler|pre_logits)(?:\.|$)")
_INNER = re.compile(r"^(?:(?:layers?|blocks?|units?|resnets|downsamplers|upsamplers|convs?)\.)?([0-9]+)\.")
_FINAL = re.compile(r"(?:^|\.)(?:(?:final\w*|ln_f|ln_out|norm|norm_f|\w*layer_?norm|project_out)\w*)(?:\.|$)")

_LONGEST = 256  # characters; no model has longer names, on which the patterns would take too long

_EMBED_RANK, _LAYER_RANK, _FINAL_RANK, _HEAD_RANK = range(4)
# The kind (as above), whether it is in a decoder, the stage's name, the layer in the stage, the layer inside that one.
_Rank = tuple[int, int, tuple[str | int, ...], int, int]


class _Placed(Protocol):
    @property
    def shard(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def dtype(self) -> str: ...


def execution_order(tensors: Mapping[str, _Placed]) -> list[str]:
    """Sort tensors by name: embeddings, layers by stage and number, final norm, head.

    Inside a layer, the order of the file is kept, so that ranges stay long. A tensor whose name says nothing follows
    the one before it in the file. A recorded order (``trace.py``) is better.
    """
    # By dtype, because some files are sorted by it: they contain the whole model's order once for each dtype.
    last: dict[str, _Rank] = {}
    ranks: list[tuple[_Rank, str]] = []
    for name in sorted(tensors, key=lambda name: (tensors[name].shard, tensors[name].start)):
        dtype = tensors[name].dtype
        last[dtype] = _rank(name) or last.get(dtype, _plain(_EMBED_RANK))
        ranks.append((last[dtype], name))
    ranks.sort(key=lambda item: item[0])
    return [name for _, name in ranks]


def layer_numbers(order: Sequence[str]) -> dict[str, int]:
    """Return the number of the layer that each tensor belongs to, for those that belong to one.

    In a model that takes pictures, these are the layers of its decoder.
    """
    return _numbers({name: _text_rank(name) for name in order})


def _numbers(ranks: Mapping[str, _Rank | None]) -> dict[str, int]:
    return {name: rank[3] for name, rank in ranks.items() if rank is not None and rank[0] == _LAYER_RANK}


def layers_first(order: Sequence[str], start: int, stop: int) -> tuple[list[str], list[str]]:
    """Split an execution order in two: what a worker for the layers [start, stop) needs, and everything else.

    A worker with ``start`` 0 also needs what comes before the first layer. A worker with the last layer also needs what
    comes after it, and the embedding if the model's head has no tensor of its own. A worker's region has its tensors in
    the order of the two parts, one after the other; splitting that order gives the same parts again.
    """
    ranks = {name: _text_rank(name) for name in order}
    numbers = _numbers(ranks)
    last = stop > max(numbers.values(), default=0)
    tied = last and not any(rank is not None and rank[0] == _HEAD_RANK for rank in ranks.values())
    front = next((place for place, name in enumerate(order) if name in numbers), len(order))

    def mine(place: int, name: str) -> bool:
        if name in numbers:
            return start <= numbers[name] < stop
        rank = ranks[name]
        before = place < front if rank is None else rank[0] == _EMBED_RANK
        return start == 0 or tied if before else last

    own = [name for place, name in enumerate(order) if mine(place, name)]
    taken = set(own)
    return own, [name for name in order if name not in taken]


def _plain(kind: int) -> _Rank:
    return kind, 0, (), 0, 0


def _text_rank(name: str) -> _Rank | None:
    """Return a tensor's rank. What takes pictures or sound comes before the first layer of the decoder."""
    return _rank(name) if text_name(name) is not None else _plain(_EMBED_RANK)


def _rank(name: str) -> _Rank | None:
    if len(name) > _LONGEST:
        return None
    layer = _LAYER.search(name)
    if layer:
        stage = name[: layer.start(1) if layer[1] else layer.start(2)]
        if _HEAD.search(stage):  # a head of several layers: VGG's classifier.0 … classifier.6
            return _HEAD_RANK, 0, (), int(layer[1] or layer[2]), 0
        inner = _INNER.match(name[layer.end() :])
        # ResNet's layer1.0 … layer4.2, a U-Net's down_blocks.0.resnets.1; encoders come before decoders.
        is_decoder = "decoder" in stage and "model.decoder" not in stage
        # Every second item is a number, so that stage 10 comes after stage 9.
        words = tuple(int(word) if at % 2 else word for at, word in enumerate(re.split(r"([0-9]+)", stage)))
        return _LAYER_RANK, int(is_decoder), words, int(layer[1] or layer[2]), int(inner[1]) if inner else 0
    for pattern, rank in ((_HEAD, _HEAD_RANK), (_EMBEDDING, _EMBED_RANK), (_FINAL, _FINAL_RANK)):
        if pattern.search(name):
            return _plain(rank)
    return None
