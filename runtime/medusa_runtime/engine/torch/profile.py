"""Profiles a model offline: one forward shows the execution order of the weights, another the memory it takes."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...checkpoint.index import WeightIndex
from ...config import Settings
from ...load.loader import Loader
from ...load.plan import Rename
from ...load.trace import record_execution_order
from ...models import DecoderModel
from ...models.backend import backend
from ...models.base import ModelConfig
from ...models.layers.whole import WholeAttention
from ...region.reader import Region
from ...state.kv_plan import KvPlan, plan_to_record
from ...timeline import Timeline
from ..base import GenerateRequest, SamplingParams
from ..checkpoint_files import read_config
from ..encoder.text_encoder import Encoder
from ..forward_memory import MOST_TOKENS, measure_forward
from ..serving.sequence import Sequence, Span
from ..serving.transcript import Transcript
from .kv_cache import KvCache, KvShape, blocks_for
from .kv_size import estimated_activation_bytes, geometry
from .recurrent_states import RecurrentStates
from .runner import run_step

_ORDER_TOKENS = 4


class Profile(NamedTuple):
    """A profile's result. ``order``: the tensors' names in execution order. ``plan``: None for encoders (no cache)."""

    order: list[str]
    plan: KvPlan | None


def profile(region: Region, settings: Settings) -> Profile:
    """Profile a region's model on this machine's CPU. Raises what an engine would raise for it."""
    if backend(region.file, settings).kind in ("encoder", "classifier"):
        return Profile(_encoder_order(region), None)
    config = read_config(region.file, region.wait_index(), settings.dtype, settings.max_model_len)
    dtype = config.dtype
    model = config.model()
    config = model.config
    timeline = Timeline.create("profile")
    applier = model.applier(dtype)
    loader = Loader(region, applier, timeline=timeline)
    try:
        loader.wait()
        with torch.inference_mode():
            order = _order(model, loader, config)
            measured = _activations(model, KvShape.of(config, dtype), settings, config)
    finally:
        loader.close()
    if measured is None:
        measured = estimated_activation_bytes(loader.index, config, settings, dtype)
    shape = geometry(KvShape.of(config, dtype), config.max_positions)
    return Profile(order, plan_to_record(shape, settings, activation_bytes=measured))


def _encoder_order(region: Region) -> list[str]:
    encoder = Encoder(region, Timeline.create("profile"))
    try:
        encoder.wait()
        with torch.inference_mode():
            used = record_execution_order(encoder._model, torch.zeros((1, _ORDER_TOKENS), dtype=torch.long))
    finally:
        encoder.close()
    return _named(used, encoder._model.rename, encoder.index)


def _order(model: DecoderModel, loader: Loader, config: ModelConfig) -> list[str]:
    def forward(token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits = model.run(token_ids, positions, WholeAttention(), positions)
        assert logits is not None
        return logits

    model.forward = forward  # a decoder has no forward, because engines call its parts
    try:
        places = torch.arange(_ORDER_TOKENS)
        used = record_execution_order(model, places % config.vocab_size, places)
    finally:
        del model.forward
    return _named(used, model.rename, loader.index)


def _named(used: list[str], rename: Rename, index: WeightIndex) -> list[str]:
    """Return the checkpoint's tensor names in the order of the ``used`` parameters; unused tensors come last."""
    rank = {name: number for number, name in enumerate(used)}
    order = sorted(index.order, key=lambda name: rank.get(rename(name) or "", len(rank)))
    return index.stored_names(order)


def _activations(model: DecoderModel, shape: KvShape, settings: Settings, config: ModelConfig) -> int | None:
    """Measure the most bytes that a forward of ``max_batched_tokens`` takes beside weights and cache.

    Returns None if this kernel does not report it.
    """
    tokens = min(settings.max_batched_tokens, MOST_TOKENS, config.max_positions)
    states = RecurrentStates(config.states, shape.dtype, 1) if config.states else None
    cache = KvCache(shape, blocks_for(tokens), numbers=config.attention_layers, states=states)
    run_step(model, cache, prefill_step(tokens))  # so that weights, cache, threads and lasting buffers do not count
    return measure_forward(
        lambda: run_step(model, cache, prefill_step(tokens)), settings, tokens=tokens, vocabulary=config.vocab_size
    )


def prefill_step(tokens: int) -> list[Span]:
    """Make a step with one prompt of ``tokens`` tokens, in the first blocks of a cache that is not in use."""
    request = GenerateRequest("profile", (0,) * tokens, SamplingParams())
    sequence = Sequence(
        request,
        [0] * tokens,
        lambda _: None,
        limit=tokens + 1,
        eos_token_ids=frozenset(),
        transcript=Transcript(None, (), include_stop=False),
    )
    sequence.blocks = list(range(blocks_for(tokens)))
    sequence.slot = 0
    return [Span(sequence, 0, tokens)]


__all__ = ["Profile", "prefill_step", "profile"]
