"""Steps of modules that can run only their own attention, such as those with ALiBi.

The keys and values of a step's sequences are gathered from the paged cache into a cache of transformers, and the new
ones are written back. Sequences in decode run as one batch, padded on the left. Prompts run one by one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import EngineError

if TYPE_CHECKING:
    from .decoder import TransformersDecoder


def run_gathered(
    model: TransformersDecoder, token_ids: Tensor, positions: Tensor, attention: Any, rows: Tensor | None
) -> Tensor | None:
    """Run a step like ``DecoderModel.run``, for an attention with ``spans`` and a ``cache``."""
    wanted = set() if rows is None else set(rows.tolist())
    found: dict[int, Tensor] = {}
    starts: list[int] = []
    at = 0
    for span in attention.spans:
        starts.append(at)
        at += span.stop - span.start
    decodes = [n for n, span in enumerate(attention.spans) if span.stop - span.start == 1]
    prefills = [[n] for n, span in enumerate(attention.spans) if span.stop - span.start > 1]
    for batch in ([decodes] if decodes else []) + prefills:
        size = attention.spans[batch[0]].stop - attention.spans[batch[0]].start
        places = torch.tensor([list(range(starts[n], starts[n] + size)) for n in batch])
        keep = 1 if wanted.isdisjoint(places[:, :-1].flatten().tolist()) else size
        spans = [attention.spans[n] for n in batch]
        logits = _run_batch(model, token_ids[places], positions[places], attention, spans, keep)
        for row, n in enumerate(batch):
            for at in range(1, keep + 1):
                place = starts[n] + size - at
                if place in wanted:
                    found[place] = logits[row, -at]
    return None if rows is None else torch.stack([found[row] for row in rows.tolist()])


def _run_batch(
    model: TransformersDecoder, ids: Tensor, positions: Tensor, attention: Any, spans: list[Any], keep: int
) -> Tensor:
    """Run spans of the same number of tokens; return the logits [sequences, keep, vocab] of the last ``keep``."""
    from transformers.cache_utils import DynamicCache

    size = ids.shape[1]
    past = [span.start for span in spans]
    longest = max(past)
    mask = torch.ones(len(spans), longest + size, dtype=torch.long)
    for row, length in enumerate(past):
        mask[row, : longest - length] = 0
    cache = DynamicCache()
    layers = range(model.config.num_layers)
    if longest:
        slots = torch.zeros(len(spans), longest, dtype=torch.long)
        for row, span in enumerate(spans):
            slots[row, longest - span.start :] = torch.tensor(span.sequence.slots(0, span.start), dtype=torch.long)
        absent = (mask[:, :longest] == 0)[:, :, None, None] if min(past) < longest else None
        for layer in layers:
            pair = []
            for pool in attention.cache.slots[layer]:
                held = pool[slots]
                # Unused slots may hold a NaN, which a mask would not hide.
                pair.append((held if absent is None else held.masked_fill(absent, 0)).transpose(1, 2))
            cache.update(*pair, layer)
    past_tokens = {model.cache_argument: cache}
    logits = model.call(ids, positions, attention_mask=mask, use_cache=True, logits_to_keep=keep, **past_tokens)
    slots = torch.tensor([slot for span in spans for slot in span.sequence.slots(span.start, span.stop)])
    for layer in layers:
        held = cache.layers[layer]
        k, v = (pair[:, :, longest:].transpose(1, 2).flatten(0, 1) for pair in (held.keys, held.values))
        if k.shape[1:] != attention.cache.slots[layer][0].shape[1:]:
            raise EngineError(
                f"{model.config.architecture} has keys of {list(k.shape[1:])}, and its config.json led to expect "
                f"{list(attention.cache.slots[layer][0].shape[1:])}; expected --engine vllm for this model"
            )
        attention.cache.write(layer, slots, k, v)
    return logits


__all__ = ["run_gathered"]
