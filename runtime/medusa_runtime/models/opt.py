"""OPT. Positions are learned, layer norms come first or (350m) last, and embeddings may be narrower than the layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, cast

from torch import Tensor, nn

from medusa_runtime.models.base import Attention, DecoderModel, ModelConfig
from medusa_runtime.models.fields import Fields
from medusa_runtime.models.layers.activation import ACTIVATIONS
from medusa_runtime.models.layers.embedding import Embedding
from medusa_runtime.models.layers.linear import Linear, project

POSITION_OFFSET = 2  # the first two rows of embed_positions belong to fairseq's special symbols


@dataclass(frozen=True, kw_only=True)
class OPTConfig(ModelConfig):
    ffn_dim: int
    embed_dim: int
    activation: str
    bias: bool
    norm_affine: bool
    norm_first: bool
    final_norm: bool

    @classmethod
    def read(cls, architecture: str, fields: Fields) -> Self:
        fields = Fields({**fields.raw, "head_dim": None}, fields.where)  # transformers' OPT does not read it
        common = cls.common(architecture, fields, tied=True)
        norm_first = fields.flag("do_layer_norm_before", default=True)
        return cls(
            **common,
            ffn_dim=fields.count("ffn_dim"),
            embed_dim=fields.count("word_embed_proj_dim", default=common["hidden_size"]),
            activation=fields.choice("activation_function", ACTIVATIONS, default="relu"),
            bias=fields.flag("enable_bias", default=True),
            norm_affine=fields.flag("layer_norm_elementwise_affine", default=True),
            norm_first=norm_first,
            final_norm=norm_first and not fields.flag("_remove_final_layer_norm", default=False),
        )

    def construct(self) -> OPT:
        return OPT(self)


class OPTAttention(nn.Module):
    FUSED = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, config: OPTConfig, index: int) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.index = index
        self.window = config.windows[index]
        self.shape = (-1, config.num_heads, config.head_dim)
        self.scale = config.head_dim**-0.5
        self.q_proj = Linear(hidden, hidden, bias=config.bias)
        self.k_proj = Linear(hidden, hidden, bias=config.bias)
        self.v_proj = Linear(hidden, hidden, bias=config.bias)
        self.out_proj = Linear(hidden, hidden, bias=config.bias)

    def forward(self, hidden: Tensor, attention: Attention) -> Tensor:
        parts = project(hidden, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (part.view(self.shape) for part in parts)
        out = attention.attend(self.index, q, k, v, scale=self.scale, window=self.window)
        return cast(Tensor, self.out_proj(out.reshape(hidden.shape)))


class OPTLayer(nn.Module):
    def __init__(self, config: OPTConfig, index: int) -> None:
        super().__init__()
        self.norm_first = config.norm_first
        self.self_attn = OPTAttention(config, index)
        self.self_attn_layer_norm = nn.LayerNorm(config.hidden_size, elementwise_affine=config.norm_affine)
        self.fc1 = Linear(config.hidden_size, config.ffn_dim, bias=config.bias)
        self.fc2 = Linear(config.ffn_dim, config.hidden_size, bias=config.bias)
        self.final_layer_norm = nn.LayerNorm(config.hidden_size, elementwise_affine=config.norm_affine)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, hidden: Tensor, context: None, attention: Attention) -> Tensor:
        if self.norm_first:
            hidden = hidden + self.self_attn(self.self_attn_layer_norm(hidden), attention)
            return hidden + cast(Tensor, self.fc2(self.activation(self.fc1(self.final_layer_norm(hidden)))))
        hidden = self.self_attn_layer_norm(hidden + self.self_attn(hidden, attention))
        return cast(Tensor, self.final_layer_norm(hidden + self.fc2(self.activation(self.fc1(hidden)))))


class OPT(DecoderModel):
    config_class = OPTConfig
    embedding_modules = ("embed_tokens", "embed_positions", "project_in")

    def __init__(self, config: OPTConfig) -> None:
        super().__init__()
        self.config = config
        hidden, narrow = config.hidden_size, config.embed_dim
        self.embed_tokens = Embedding(config.vocab_size, narrow)
        self.embed_positions = Embedding(config.max_positions + POSITION_OFFSET, hidden)
        self.project_in = Linear(narrow, hidden, bias=False) if narrow != hidden else None
        self.layers = nn.ModuleList(OPTLayer(config, index) for index in range(config.num_layers))
        norm = nn.LayerNorm(hidden, elementwise_affine=config.norm_affine)
        self.final_layer_norm = norm if config.final_norm else None
        self.project_out = Linear(hidden, narrow, bias=False) if narrow != hidden else None
        self.lm_head = Linear(narrow, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        hidden = self.embed_tokens(token_ids)
        if self.project_in is not None:
            hidden = self.project_in(hidden)
        return cast(Tensor, hidden + self.embed_positions(positions + POSITION_OFFSET))

    def logits(self, hidden: Tensor) -> Tensor:
        for unit in (self.final_layer_norm, self.project_out):
            if unit is not None:
                hidden = unit(hidden)
        return cast(Tensor, self.lm_head(hidden))

    def rename(self, name: str) -> str | None:
        return name.removeprefix("model.").removeprefix("decoder.")
