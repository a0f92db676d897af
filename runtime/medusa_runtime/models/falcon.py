"""Falcon. Attention and MLP run in parallel, after one layer norm (7B) or one each, or they run one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Self, cast

from torch import Tensor, nn

from medusa_runtime.errors import ModelError
from medusa_runtime.models.base import Attention, DecoderModel, ModelConfig
from medusa_runtime.models.fields import Fields
from medusa_runtime.models.layers.activation import ACTIVATIONS
from medusa_runtime.models.layers.embedding import Embedding
from medusa_runtime.models.layers.linear import Linear
from medusa_runtime.models.layers.rope import Rope, RopeConfig, Rotation


@dataclass(frozen=True, kw_only=True)
class FalconConfig(ModelConfig):
    ffn_size: int
    norm_eps: float
    activation: str
    bias: bool
    parallel: bool
    two_norms: bool
    rope: RopeConfig

    @classmethod
    def read(cls, architecture: str, fields: Fields) -> Self:
        if fields.flag("alibi", default=False):
            raise ModelError(
                f"{fields.where}: the torch engine has no ALiBi attention (alibi is true); it runs Falcon with rope "
                "(Falcon-7B, 40B, 11B). For this one use --engine vllm."
            )
        grouped = fields.flag("new_decoder_architecture", default=False)
        heads = fields.count("num_attention_heads", "n_head")
        kv_heads = 1 if fields.flag("multi_query", default=True) else heads
        if grouped:
            kv_heads = fields.count("num_kv_heads", "n_head_kv", default=heads)
        common = cls.common(architecture, fields, tied=True, kv_heads=kv_heads)
        return cls(
            **common,
            ffn_size=fields.count("ffn_hidden_size", default=4 * common["hidden_size"]),
            norm_eps=fields.number("layer_norm_epsilon", default=1e-5),
            activation=fields.choice("activation", ACTIVATIONS, default="gelu"),
            bias=fields.flag("bias", default=False),
            parallel=grouped or fields.flag("parallel_attn", default=True),
            two_norms=grouped and fields.count("num_ln_in_parallel_attn", default=2) == 2,
            rope=RopeConfig.read(fields, head_dim=common["head_dim"], max_positions=common["max_positions"]),
        )

    def construct(self) -> Falcon:
        return Falcon(self)


class FalconAttention(nn.Module):
    """Attention with one tensor for q, k and v. It has, for each kv head, its query heads, its key and its value."""

    def __init__(self, config: FalconConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.window = config.windows[index]
        self.scale = config.head_dim**-0.5
        group = config.num_heads // config.num_kv_heads
        self.shape = (-1, config.num_kv_heads, group + 2, config.head_dim)
        self.split = [group, 1, 1]
        fused = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        self.query_key_value = Linear(config.hidden_size, fused, bias=config.bias)
        self.dense = Linear(config.num_heads * config.head_dim, config.hidden_size, bias=config.bias)

    def forward(self, hidden: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        fused = self.query_key_value(hidden).view(self.shape)
        q, k, v = (part.flatten(1, 2) for part in fused.split(self.split, dim=2))
        q, k = rotation(q, k)
        out = attention.attend(self.index, q, k, v, scale=self.scale, window=self.window)
        return cast(Tensor, self.dense(out.reshape(hidden.shape[0], -1)))


class FalconMLP(nn.Module):
    def __init__(self, config: FalconConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = Linear(config.hidden_size, config.ffn_size, bias=config.bias)
        self.dense_4h_to_h = Linear(config.ffn_size, config.hidden_size, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.dense_4h_to_h(self.activation(self.dense_h_to_4h(hidden))))


class FalconLayer(nn.Module):
    def __init__(self, config: FalconConfig, index: int) -> None:
        super().__init__()
        self.parallel = config.parallel
        self.two_norms = config.parallel and config.two_norms
        norm = partial(nn.LayerNorm, config.hidden_size, eps=config.norm_eps)
        if self.two_norms:
            self.ln_attn, self.ln_mlp = norm(), norm()
        else:
            self.input_layernorm = norm()
        if not config.parallel:
            self.post_attention_layernorm = norm()
        self.self_attention = FalconAttention(config, index)
        self.mlp = FalconMLP(config)

    def forward(self, hidden: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        normed = self.ln_attn(hidden) if self.two_norms else self.input_layernorm(hidden)
        attended = self.self_attention(normed, rotation, attention)
        if not self.parallel:
            hidden = hidden + attended
            return hidden + cast(Tensor, self.mlp(self.post_attention_layernorm(hidden)))
        return hidden + cast(Tensor, attended + self.mlp(self.ln_mlp(hidden) if self.two_norms else normed))


class Falcon(DecoderModel):
    config_class = FalconConfig
    embedding_modules = ("word_embeddings",)

    def __init__(self, config: FalconConfig) -> None:
        super().__init__()
        self.config = config
        self.rope = Rope(config.rope)
        self.word_embeddings = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(FalconLayer(config, index) for index in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.word_embeddings.weight

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return cast(Tensor, self.word_embeddings(token_ids))

    def prepare(self, hidden: Tensor, positions: Tensor, attention: Attention) -> Rotation:
        return self.rope.rotation(positions, hidden.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.lm_head(self.ln_f(hidden)))

    def rename(self, name: str) -> str | None:
        if name.endswith("rotary_emb.inv_freq"):
            return None
        name = name.removeprefix("transformer.")
        return "layers." + name.removeprefix("h.") if name.startswith("h.") else name
