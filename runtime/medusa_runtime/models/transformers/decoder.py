"""A decoder of transformers, behind the interface of our own families."""

from __future__ import annotations

import inspect
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...load.skeleton import skeleton
from ..base import Attention, DecoderModel
from .applier import TransformersApplier
from .attention import NAME, STEP, Step, attend, cache_argument
from .catalog import STATES
from .config import TransformersConfig, own_class, own_config, without_cache
from .construct import construct, default_dtype, own_attention
from .experts import separate_experts
from .faster import use_our_parts
from .gathered import run_gathered
from .programs import use_programs
from .recurrent import attends, unknown_states, use_states
from .rope import fix_factors

# Classes that claim to take any attention, but need masks or biases that only their own attention adds.
_OWN_ATTENTION = frozenset({"FalconForCausalLM"})


class TransformersDecoder(DecoderModel):
    """A module of transformers that runs over flat batches.

    A module that takes any attention gets the engine's. Others run their own attention, over keys and values that are
    gathered from the engine's cache.
    """

    config: TransformersConfig

    def __init__(self, config: TransformersConfig) -> None:
        super().__init__()
        self.config = config
        self.module, self.gathers = build(config)
        accepted = inspect.signature(type(self.module).forward).parameters
        base = inspect.signature(type(self.module.base_model).forward).parameters
        self._takes_positions = "position_ids" in accepted or "position_ids" in base
        self.cache_argument = cache_argument(type(self.module).forward)
        self._applier: TransformersApplier | None = None
        self._step = Step()
        self._step.kv_heads, self._step.head_dim = config.num_kv_heads, config.head_dim
        for part in self.module.modules():
            if isinstance(getattr(part, "layer_idx", None), int) and not self.gathers:
                setattr(part, STEP, self._step)
            if hasattr(part, "warn_if_padding_and_no_attention_mask"):
                part.warn_if_padding_and_no_attention_mask = _say_nothing
        self.config = self._with_states(config)
        use_our_parts(self.module, config.dtype)
        use_programs(self.module, self._step)

    def _with_states(self, config: TransformersConfig) -> TransformersConfig:
        """Return the configuration with what the module's layers keep of a sequence, which the module shows.

        Raises ModelError for a module whose layers do so in an unknown way, or of which none attends.
        """
        if STATES not in source_of(type(self.module)):
            return config
        attending = {part.layer_idx for part in self.module.modules() if attends(type(part))}
        if not attending or not attending <= {*range(config.num_layers)}:
            found = "some that share them" if attending else "no layer that attends"
            raise without_cache(config.architecture, found)
        states = use_states(self.module, config.num_layers, config.hidden_size, config.dtype, self._step)
        if not states and type(self.module)._supports_attention_backend:
            return config
        if not states:
            raise unknown_states(self.module, "none of its layers shows one")
        layers = tuple(sorted(attending))
        return replace(config, states=tuple(map(tuple, states)), kv_layers=layers)

    def run(self, token_ids: Tensor, positions: Tensor, attention: Attention, rows: Tensor | None) -> Tensor | None:
        if self.gathers and hasattr(attention, "spans"):
            return run_gathered(self, token_ids, positions, attention, rows)
        self._step.begin(attention)
        keep = torch.empty(0, dtype=torch.long) if rows is None else rows
        logits = self.call(token_ids.unsqueeze(0), positions.unsqueeze(0), logits_to_keep=keep, use_cache=False)[0]
        return None if rows is None else logits

    def call(self, token_ids: Tensor, positions: Tensor, **options: Any) -> Tensor:
        """Return the module's logits for token ids and positions [sequences, tokens]."""
        if self._takes_positions:
            options["position_ids"] = positions
        logits: Tensor = self.module(input_ids=token_ids, return_dict=True, **options).logits
        return logits

    def rename(self, name: str) -> str | None:
        target = None if self._applier is None else self._applier.target(name)
        return None if target is None else f"module.{target}"

    def applier(self, dtype: torch.dtype) -> TransformersApplier:
        self._applier = TransformersApplier(
            self.module, lambda: build(self.config)[0], dtype, self.config.quantization, text_part=True
        )
        return self._applier


def _say_nothing(*_: Any) -> None:
    """Do nothing, in place of a method that looks for padding tokens in each batch. There is no padding here."""


def build(config: TransformersConfig) -> tuple[Any, bool]:
    """Build the module that a config describes, as a skeleton. Also return whether it needs its own attention."""
    from transformers.modeling_utils import AttentionInterface

    kind = own_class(config.found_class)
    AttentionInterface.register(NAME, attend)
    own = own_config(config.found_class, config.raw)
    fix_factors(own, config.longest)
    gathers = config.found_class.name in _OWN_ATTENTION or masks(kind, own)
    if not kind._supports_attention_backend and STATES not in source_of(kind):  # layers with states ask the engine
        gathers = True
    own._attn_implementation = own_attention(kind) if gathers else NAME
    own._experts_implementation = "eager"  # only the experts that a step needs are read
    with skeleton():
        module = construct(kind, own, config.dtype)
    with default_dtype(config.dtype):
        separate_experts(module)
    return module, gathers


def masks(kind: Any, own: Any) -> bool:
    """Return whether a class hides tokens from others by a mask alone, which the engine's attention does not take.

    Classes with sliding windows pass their size to the attention, too, except for a few.
    """
    source = source_of(kind)
    sizes = []
    if "create_chunked_causal_mask" in source:
        sizes.append(getattr(own, "attention_chunk_size", None))
    if "create_sliding_window_causal_mask" in source and "sliding_window=" not in source:
        sizes.append(getattr(own, "sliding_window", None))
    longest = getattr(own, "max_position_embeddings", None) or math.inf
    return any(isinstance(size, int) and size < longest for size in sizes)


def source_of(kind: Any) -> str:
    """Return the source of the module in which a class of transformers is."""
    return Path(str(sys.modules[kind.__module__].__file__)).read_text()


__all__ = ["TransformersDecoder", "build"]
