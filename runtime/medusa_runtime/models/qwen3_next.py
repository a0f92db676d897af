"""Qwen3-Next and Qwen3.5 (Qwen Team, 2025): three of four layers have linear attention, the others gated attention.

Linear attention keeps a matrix for each head, which each token corrects by what it brings (gated delta rule: Yang et
al., 2024). Checkpoints of both have experts or perceptrons, and lay out the inputs of linear attention in two ways.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medusa_runtime.checkpoint.index import TensorEntry
from medusa_runtime.models.base import Attention, StatefulAttention, StateShape
from medusa_runtime.models.fields import Fields
from medusa_runtime.models.layers.linear import Linear, project
from medusa_runtime.models.layers.norm import RMSNorm
from medusa_runtime.models.layers.rope import RopeConfig, Rotation
from medusa_runtime.models.layers.taps import Taps, count_of_taps
from medusa_runtime.models.llama import (
    Llama,
    LlamaConfig,
    SelfAttention,
    layers_that_attend,
    stateful,
    with_defaults,
)
from medusa_runtime.models.mixture import MixtureConfig, expert_parts

_NORM_EPS = 1e-6  # of the lengths of queries and keys


class LinearSizes(NamedTuple):
    """The sizes of linear attention. Queries and keys have ``key_heads``, each for as many heads of values."""

    taps: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def channels(self) -> int:
        """The width of queries, keys and values together, which the convolution gets."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(LlamaConfig):
    """``linear`` has the sizes of linear attention.

    ``grouped`` says that a checkpoint has its inputs together, key head by key head.
    """

    linear: LinearSizes
    grouped: bool

    @classmethod
    def read(cls, architecture: str, fields: Fields) -> Self:
        fields = with_defaults(architecture, fields)
        return cls(**_read(architecture, fields))

    def construct(self) -> Llama:
        return Qwen3Next(self)

    def norm(self) -> RMSNorm:
        return RMSNorm(self.hidden_size, self.norm_eps, once=True, offset=1.0)

    def attention(self, index: int) -> SelfAttention:
        return GatedAttention(self, index)


@dataclass(frozen=True, kw_only=True)
class Qwen3NextMoeConfig(Qwen3NextConfig, MixtureConfig):
    @classmethod
    def read(cls, architecture: str, fields: Fields) -> Self:
        fields = with_defaults(architecture, fields)
        if fields.get("intermediate_size") is None:  # Qwen3.5's mixtures have no perceptrons without experts
            fields = Fields({**fields.raw, "intermediate_size": fields.get("moe_intermediate_size")}, fields.where)
        read = _read(architecture, fields)
        sparse = cls.sparse_layers(fields, read["num_layers"])
        return cls(**read, **cls.mixture(read["num_layers"], fields, sparse, shared=True))

    def construct(self) -> Llama:
        return Qwen3NextMoe(self)


def _read(architecture: str, fields: Fields) -> dict[str, Any]:
    """Read what all of these models have, as arguments of a configuration's constructor."""
    raw = dict(fields.raw)
    key = "rope_scaling" if raw.get("rope_scaling") or not raw.get("rope_parameters") else "rope_parameters"
    scaling = raw.get(key) or {}
    if not isinstance(scaling, dict):
        raise fields.error(key, "an object", scaling)
    rope = Fields({"partial_rotary_factor": raw.pop("partial_rotary_factor", None)} | scaling, f"{fields.where} {key}")
    share = rope.positive("partial_rotary_factor", default=0.25)
    if share > 1:
        raise rope.error("partial_rotary_factor", "at most 1", share)
    raw[key] = {name: value for name, value in scaling.items() if name != "partial_rotary_factor"}
    plain = Fields(raw, fields.where)
    llama = LlamaConfig.read(architecture, plain)
    rotated = RopeConfig.read(plain, head_dim=int(llama.head_dim * share), max_positions=llama.max_positions)
    every = fields.count("full_attention_interval", default=4)
    usual = [(layer + 1) % every == 0 for layer in range(llama.num_layers)]
    attends = layers_that_attend(fields, "linear_attention", usual)
    linear = LinearSizes(
        count_of_taps(fields, "linear_conv_kernel_dim", default=4),
        fields.count("linear_num_key_heads", default=16),
        fields.count("linear_num_value_heads", default=32),
        fields.count("linear_key_head_dim", default=128),
        fields.count("linear_value_head_dim", default=128),
    )
    if linear.heads % linear.key_heads:
        expected = f"a divisor of the {linear.heads} heads of values"
        raise fields.error("linear_num_key_heads", expected, linear.key_heads)
    inputs = StateShape((linear.taps - 1, linear.channels))
    matrices = StateShape((linear.heads, linear.key_dim, linear.value_dim), torch.float32)
    return vars(llama) | {
        "rope": rotated, "qk_norm": True, "linear": linear, "grouped": architecture.startswith("Qwen3Next"),
        **stateful(attends, (inputs, matrices)),
    }  # fmt: skip


class GatedAttention(SelfAttention):
    """Attention whose result is gated by a second half of the queries' projection, head by head."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__(config, index)
        size = config.head_dim
        self.q_proj = Linear(config.hidden_size, 2 * config.num_heads * size, bias=config.qkv_bias)
        self.q_norm = RMSNorm(size, config.norm_eps, once=True, offset=1.0)
        self.k_norm = RMSNorm(size, config.norm_eps, once=True, offset=1.0)

    def forward(self, normed: Tensor, hidden: Tensor | None, rotation: Rotation, attention: Attention) -> Tensor:
        both, k, v = project(normed, self.q_proj, self.k_proj, self.v_proj)
        heads, size = self.q_shape[1:]
        q, gate = both.view(-1, heads, 2 * size).chunk(2, -1)
        q, k = rotation(self.q_norm(q), self.k_norm(k.view(self.kv_shape)))
        out = self.attend(attention, q, k, v.view(self.kv_shape)) * torch.sigmoid(gate)
        return cast(Tensor, self.o_proj(out.reshape(normed.shape[0], -1), hidden))


class GatedDeltaNet(nn.Module):
    """Linear attention with the gated delta rule, behind a short convolution of queries, keys and values."""

    stays_float32 = ("A_log",)  # where the checkpoint has it so: all tokens of a sequence share its error

    def __init__(self, config: Qwen3NextConfig, index: int) -> None:
        super().__init__()
        sizes = config.linear
        self.index, self.grouped = index, config.grouped
        self.keys, self.values = (sizes.key_heads, sizes.key_dim), (sizes.heads, sizes.value_dim)
        width = sizes.heads * sizes.value_dim
        if config.grouped:
            self.in_proj_qkvz = Linear(config.hidden_size, sizes.channels + width, bias=False)
            self.in_proj_ba = Linear(config.hidden_size, 2 * sizes.heads, bias=False)
        else:
            self.in_proj_qkv = Linear(config.hidden_size, sizes.channels, bias=False)
            self.in_proj_z = Linear(config.hidden_size, width, bias=False)
            self.in_proj_b = Linear(config.hidden_size, sizes.heads, bias=False)
            self.in_proj_a = Linear(config.hidden_size, sizes.heads, bias=False)
        self.conv1d = Taps(index, sizes.channels, sizes.taps, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(sizes.heads))
        self.A_log = nn.Parameter(torch.empty(sizes.heads))
        self.norm = RMSNorm(sizes.value_dim, config.norm_eps)
        self.out_proj = Linear(width, config.hidden_size, bias=False)

    def forward(self, normed: Tensor, hidden: Tensor, attention: StatefulAttention) -> Tensor:
        """Return ``hidden`` plus the attention over ``normed``, both [tokens, hidden]."""
        tokens, dtype = normed.shape[0], normed.dtype
        mixed, gate, rate, step = self.inputs(normed)
        mixed = F.silu(self.conv1d(mixed, attention)).float()
        count = self.keys[0] * self.keys[1]
        q, k, v = torch.split(mixed, [count, count, mixed.shape[1] - 2 * count], -1)
        q, k = (_unit(x.reshape(tokens, *self.keys)) for x in (q, k))
        # softplus computes log(1 + exp(x)); a state decays by exp(-exp(A_log) * dt)
        decay = torch.exp(-self.A_log.float().exp() * F.softplus(step.float() + self.dt_bias.float()))
        rate = torch.sigmoid(rate).float()
        read = attention.recur(self.index, q * self.keys[1] ** -0.5, k, v.reshape(tokens, *self.values), decay, rate)
        out = self.norm(read.to(dtype)).float() * F.silu(gate.reshape(tokens, *self.values).float())
        return cast(Tensor, self.out_proj(out.to(dtype).view(tokens, -1), hidden))

    def inputs(self, normed: Tensor) -> tuple[Tensor, ...]:
        """Return what the convolution gets [tokens, channels], the gate, the rates and the steps [tokens, heads]."""
        if not self.grouped:
            return tuple(project(normed, self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a))
        together, scalars = project(normed, self.in_proj_qkvz, self.in_proj_ba)
        tokens, (key_heads, key_dim), (heads, value_dim) = len(normed), self.keys, self.values
        group = heads // key_heads  # of heads of values that share a key
        each = [key_dim, key_dim, group * value_dim, group * value_dim]
        q, k, v, gate = (x.flatten(1) for x in torch.split(together.view(tokens, key_heads, -1), each, -1))
        rate, step = (x.flatten(1) for x in scalars.view(tokens, key_heads, -1).chunk(2, -1))
        return torch.cat((q, k, v), -1), gate, rate, step


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


class Qwen3NextLayer(nn.Module):
    def __init__(self, config: Qwen3NextConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = config.norm()
        self.is_linear = bool(config.states) and bool(config.states[index])
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(config, index)
        else:
            self.self_attn = config.attention(index)
        self.post_attention_layernorm = config.norm()
        self.mlp = config.mlp(index)

    def forward(self, hidden: Tensor, rotation: Rotation, attention: StatefulAttention) -> Tensor:
        normed = self.input_layernorm(hidden)
        if self.is_linear:
            hidden = self.linear_attn(normed, hidden, attention)
        else:
            hidden = self.self_attn(normed, hidden, rotation, attention)
        return cast(Tensor, self.mlp(self.post_attention_layernorm(hidden), hidden))


class Qwen3Next(Llama):
    config: Qwen3NextConfig
    config_class: ClassVar[type[LlamaConfig]] = Qwen3NextConfig
    embedding_modules = ()  # what layers keep of a sequence stays in one process

    def __init__(self, config: Qwen3NextConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(Qwen3NextLayer(config, index) for index in range(config.num_layers))

    def rename(self, name: str) -> str | None:
        return None if name.startswith("mtp.") else super().rename(name)  # heads that guess further tokens


class Qwen3NextMoe(Qwen3Next):
    config_class = Qwen3NextMoeConfig

    def divide(self, name: str, entry: TensorEntry) -> Mapping[str, TensorEntry] | None:
        """Return the parts of a tensor that has the weights of all experts of a layer."""
        config = self.config
        assert isinstance(config, Qwen3NextMoeConfig)
        return expert_parts(name, entry, config)


__all__ = ["Qwen3Next", "Qwen3NextConfig", "Qwen3NextMoe", "Qwen3NextMoeConfig"]
