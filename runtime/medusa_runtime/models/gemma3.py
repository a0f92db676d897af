"""Gemma 3's text models (Gemma Team, 2025): norms on both sides of attention and perceptron, and a rope of each kind.

Most layers see a window only, and rotate faster than those that see everything.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from medusa_runtime.models.base import Attention
from medusa_runtime.models.fields import Fields
from medusa_runtime.models.layers.norm import RMSNorm
from medusa_runtime.models.layers.rope import Rope, RopeConfig, Rotation
from medusa_runtime.models.llama import GatedMLP, Llama, LlamaConfig, SelfAttention, layer_windows, with_defaults

_OF_ROPES = ("rope_scaling", "original_max_position_embeddings")  # keys that do not count for the rope of each kind
_THETAS = {"full_attention": 1_000_000.0, "sliding_attention": 10_000.0}
_THETA_NAMES = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(LlamaConfig):
    """``local_rope`` is that of layers with a window, and ``scale`` the factor of attention scores.

    ``softcap`` is the bound of logits, or 0.
    """

    local_rope: RopeConfig
    scale: float
    softcap: float

    @classmethod
    def read(cls, architecture: str, fields: Fields) -> Self:
        fields = with_defaults(architecture, fields)
        given = {name: value for name, value in fields.raw.items() if value is not None and name not in _OF_ROPES}
        given["hidden_act"] = fields.get("hidden_activation") or "gelu_pytorch_tanh"
        named = Fields(given | {"rope_parameters": _rope(fields, "full_attention")}, fields.where)
        llama = LlamaConfig.read(architecture, named)
        local = Fields(given | {"rope_parameters": _rope(fields, "sliding_attention")}, fields.where)
        every = fields.count("sliding_window_pattern", "_sliding_window_pattern", default=6)
        windows = layer_windows(fields, [bool((layer + 1) % every) for layer in range(llama.num_layers)])
        sees_later = fields.flag("use_bidirectional_attention", default=False)
        if sees_later:  # the window is then as wide in both directions together
            windows = tuple(window and window // 2 + 1 for window in windows)
        return cls(
            **vars(llama)
            | {
                "windows": windows,
                "sees_later": sees_later or llama.sees_later,
                "tie_word_embeddings": fields.flag("tie_word_embeddings", default=True),
                "qk_norm": True,
            },
            local_rope=RopeConfig.read(local, head_dim=llama.head_dim, max_positions=llama.max_positions),
            scale=fields.positive("query_pre_attn_scalar", default=256.0) ** -0.5,
            softcap=fields.number("final_logit_softcapping", default=0.0),
        )

    def construct(self) -> Gemma3:
        return Gemma3(self)

    def norm(self) -> RMSNorm:
        return RMSNorm(self.hidden_size, self.norm_eps, once=True, offset=1.0)

    def attention(self, index: int) -> SelfAttention:
        return Gemma3Attention(self, index)


def _rope(fields: Fields, kind: str) -> dict[str, Any]:
    """Return the ``rope_parameters`` of a kind of layers, from those of each kind, and from the older keys."""
    found: dict[str, Any] = {"rope_theta": fields.get(_THETA_NAMES[kind]) or _THETAS[kind]}
    for key in ("rope_parameters", "rope_scaling"):
        added = fields.get(key) or {}
        if not isinstance(added, dict):
            raise fields.error(key, "an object", added)
        if key == "rope_parameters":
            added = added.get(kind) or {}
            if not isinstance(added, dict):
                raise fields.error(key, f"an object with an object {kind}", added)
        elif kind == "sliding_attention":
            added = {}
        found |= added
    return found


class Gemma3Attention(SelfAttention):
    def __init__(self, config: Gemma3Config, index: int) -> None:
        super().__init__(config, index)
        self.scale = config.scale
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps, once=True, offset=1.0)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps, once=True, offset=1.0)


class Gemma3Layer(nn.Module):
    def __init__(self, config: Gemma3Config, index: int) -> None:
        super().__init__()
        self.local = config.windows[index] is not None
        self.input_layernorm = config.norm()
        self.self_attn = config.attention(index)
        self.post_attention_layernorm = config.norm()
        self.pre_feedforward_layernorm = config.norm()
        self.mlp = GatedMLP(config, config.intermediate_size)
        self.post_feedforward_layernorm = config.norm()

    def forward(self, hidden: Tensor, rotations: tuple[Rotation, Rotation], attention: Attention) -> Tensor:
        attended = self.self_attn(self.input_layernorm(hidden), None, rotations[self.local], attention)
        hidden = hidden + self.post_attention_layernorm(attended)
        return hidden + cast(Tensor, self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden))))


class Gemma3(Llama):
    config: Gemma3Config
    config_class: ClassVar[type[LlamaConfig]] = Gemma3Config

    def __init__(self, config: Gemma3Config) -> None:
        super().__init__(config)
        self.local_rope = Rope(config.local_rope)
        self.layers = nn.ModuleList(Gemma3Layer(config, index) for index in range(config.num_layers))

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        embedded = cast(Tensor, self.embed_tokens(token_ids))
        return embedded * torch.tensor(self.config.hidden_size**0.5, dtype=embedded.dtype)  # rounded, as in training

    def prepare(self, hidden: Tensor, positions: Tensor, attention: Attention) -> Any:
        return tuple(rope.rotation(positions, hidden.dtype) for rope in (self.rope, self.local_rope))

    def logits(self, hidden: Tensor) -> Tensor:
        logits, bound = super().logits(hidden), self.config.softcap
        return (logits / bound).tanh() * bound if bound else logits


__all__ = ["Gemma3", "Gemma3Config"]
