"""LFM2 (Liquid AI, 2025): most layers are gated short convolutions, and keep the last two inputs of each sequence.

The others attend. Those of LFM2-MoE have experts behind the first few layers, which sigmoids choose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medusa_runtime.models.base import StatefulAttention, StateShape
from medusa_runtime.models.fields import Fields
from medusa_runtime.models.layers.linear import Linear
from medusa_runtime.models.layers.rope import Rotation
from medusa_runtime.models.layers.taps import Taps, count_of_taps
from medusa_runtime.models.llama import GatedMLP, Llama, LlamaConfig, layers_that_attend, stateful, with_defaults
from medusa_runtime.models.mixture import MixtureConfig, Routed

_NAMES = {
    "operator_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "feed_forward": "mlp",
    "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj", "q_layernorm": "q_norm", "k_layernorm": "k_norm",
    "embedding_norm": "norm",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Lfm2Config(LlamaConfig):
    """``taps`` are those of the convolutions."""

    taps: int
    conv_bias: bool

    @classmethod
    def read(cls, architecture: str, fields: Fields) -> Self:
        fields = with_defaults(architecture, fields)
        return cls(**_read(architecture, fields))

    def construct(self) -> Llama:
        return Lfm2(self)


@dataclass(frozen=True, kw_only=True)
class Lfm2MoeConfig(Lfm2Config, MixtureConfig):
    """``scale`` is what the shares of the chosen experts are multiplied with, and ``biased`` if biases choose, too."""

    scale: float
    biased: bool

    @classmethod
    def read(cls, architecture: str, fields: Fields) -> Self:
        fields = with_defaults(architecture, fields)
        read = _read(architecture, fields)
        layers, dense = read["num_layers"], fields.index("num_dense_layers", default=2)
        return cls(
            **read,
            **cls.mixture(layers, fields, [layer >= dense for layer in range(layers)]),
            scale=fields.number("routed_scaling_factor", default=1.0),
            biased=fields.flag("use_expert_bias", default=True),
        )

    def construct(self) -> Llama:
        return Lfm2Moe(self)

    def mlp(self, index: int) -> nn.Module:
        return Lfm2Experts(self) if self.sparse[index] else GatedMLP(self, self.intermediate_size)


def _read(architecture: str, fields: Fields) -> dict[str, Any]:
    """Read what all of these models have, as arguments of a configuration's constructor."""
    names = {
        "rms_norm_eps": fields.number("norm_eps", default=1e-5),
        "tie_word_embeddings": fields.flag("tie_embedding", "tie_word_embeddings", default=True),
        "intermediate_size": _width(fields) if architecture == "Lfm2ForCausalLM" else fields.count("intermediate_size"),
    }
    llama = LlamaConfig.read(architecture, Fields(dict(fields.raw) | names, fields.where))
    taps = count_of_taps(fields, "conv_L_cache", default=3)
    attends = layers_that_attend(fields, "conv", _attends(fields, llama.num_layers))
    shape = StateShape((taps - 1, llama.hidden_size))
    return vars(llama) | {
        "qk_norm": True, "taps": taps, "conv_bias": fields.flag("conv_bias", default=False),
        **stateful(attends, (shape,)),
    }  # fmt: skip


def _width(fields: Fields) -> int:
    """Return the width of the perceptrons: two thirds of what is given, rounded up, unless it is given exactly."""
    width = fields.count("block_ff_dim", "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", default=True):
        return width
    unit = fields.count("block_multiple_of", default=256)
    width = int(fields.positive("block_ffn_dim_multiplier", default=1.0) * int(2 * width / 3))
    return -(-width // unit) * unit


def _attends(fields: Fields, layers: int) -> list[bool]:
    """Return which layers attend, if ``layer_types`` does not say it: by their numbers, or else all."""
    numbers = fields.get("full_attn_idxs")
    if numbers is None:
        return [True] * layers
    if not isinstance(numbers, list) or not all(type(one) is int for one in numbers):
        raise fields.error("full_attn_idxs", "a list of layers' numbers", numbers)
    return [layer in numbers for layer in range(layers)]


class ShortConv(nn.Module):
    """A convolution of gated inputs, whose results are gated again."""

    def __init__(self, config: Lfm2Config, index: int) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.conv_bias
        self.in_proj = Linear(hidden, 3 * hidden, bias=bias)
        self.conv = Taps(index, hidden, config.taps, bias=bias)
        self.out_proj = Linear(hidden, hidden, bias=bias)

    def forward(self, normed: Tensor, hidden: Tensor, attention: StatefulAttention) -> Tensor:
        """Return ``hidden`` plus the convolution of ``normed``, both [tokens, hidden]."""
        before, behind, x = self.in_proj(normed).chunk(3, -1)
        return cast(Tensor, self.out_proj(behind * self.conv(before * x, attention), hidden))


class ConvLayer(nn.Module):
    def __init__(self, config: Lfm2Config, index: int) -> None:
        super().__init__()
        self.input_layernorm = config.norm()
        self.conv = ShortConv(config, index)
        self.post_attention_layernorm = config.norm()
        self.mlp = config.mlp(index)

    def forward(self, hidden: Tensor, rotation: Rotation, attention: StatefulAttention) -> Tensor:
        hidden = self.conv(self.input_layernorm(hidden), hidden, attention)
        return cast(Tensor, self.mlp(self.post_attention_layernorm(hidden), hidden))


class Lfm2Experts(Routed):
    """Experts of which each token uses those with the largest sigmoids, plus a bias that counts for the choice only."""

    def __init__(self, config: Lfm2MoeConfig) -> None:
        super().__init__(config.chosen)
        self.normalized, self.scale = config.normalized, config.scale
        self.gate = Linear(config.hidden_size, config.experts, bias=False)
        self.expert_bias = nn.Parameter(torch.empty(config.experts)) if config.biased else None
        self.experts = nn.ModuleList(GatedMLP(config, config.expert_size) for _ in range(config.experts))

    def route(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        shares = F.sigmoid(self.gate(normed))
        scores = shares if self.expert_bias is None else shares + self.expert_bias
        chosen = torch.topk(scores, self.chosen, -1).indices
        shares = shares.gather(1, chosen)
        if self.normalized:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-6)
        return shares * self.scale, chosen


class Lfm2(Llama):
    config_class: ClassVar[type[LlamaConfig]] = Lfm2Config
    embedding_modules = ()  # what layers keep of a sequence stays in one process

    def __init__(self, config: Lfm2Config) -> None:
        super().__init__(config)
        for index, shapes in enumerate(config.states):
            if shapes:
                self.layers[index] = ConvLayer(config, index)

    def rename(self, name: str) -> str | None:
        found = super().rename(name)
        if found is None:
            return None
        found = found.replace("self_attn.out_proj", "self_attn.o_proj")
        return ".".join(_NAMES.get(part, part) for part in found.split("."))


class Lfm2Moe(Lfm2):
    config_class = Lfm2MoeConfig


__all__ = ["Lfm2", "Lfm2Config", "Lfm2Moe", "Lfm2MoeConfig"]
