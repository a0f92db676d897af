"""BERT and RoBERTa encoders, with the tensor names of transformers' BertModel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from medusa_runtime.errors import ModelError
from medusa_runtime.models.architectures import ENCODERS
from medusa_runtime.models.fields import Fields
from medusa_runtime.models.layers.activation import ACTIVATIONS
from medusa_runtime.models.sizes import MOST_LAYERS

_PREFIXES = ("bert.", "roberta.")
_HEADS = ("cls.", "lm_head.", "classifier.", "qa_outputs.")
_OLD = {"gamma": "weight", "beta": "bias"}  # the first checkpoints name the parameters of layer norms like this


@dataclass(frozen=True, kw_only=True)
class BertConfig:
    """The sizes of an encoder. ``first_position`` is the row of the position table for the first token of a text."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_positions: int
    segments: int = 2
    norm_eps: float = 1e-12
    activation: str = "gelu"
    first_position: int = 0
    pooler: bool = True

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], *, pooler: bool = True) -> Self:
        """Read the sizes from a config.json. Raises ModelError for another kind of model, ConfigError for a bad key."""
        kind = raw.get("model_type")
        if kind not in ENCODERS:
            raise ModelError(f"config.json: model_type is {kind!r}; expected an encoder: {', '.join(ENCODERS)}")
        fields = Fields(raw)
        hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        if hidden % heads:
            raise fields.error("hidden_size", f"a multiple of the {heads} attention heads", hidden)
        return cls(
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden,
            num_layers=fields.count("num_hidden_layers", most=MOST_LAYERS),
            num_heads=heads,
            intermediate_size=fields.count("intermediate_size"),
            max_positions=fields.count("max_position_embeddings", default=512),
            segments=fields.count("type_vocab_size", default=2),
            norm_eps=fields.number("layer_norm_eps", default=1e-12),
            activation=fields.choice("hidden_act", ACTIVATIONS, default="gelu"),
            # RoBERTa's positions begin after the padding's index.
            first_position=0 if kind == "bert" else fields.index("pad_token_id", default=1) + 1,
            pooler=pooler,
        )

    @property
    def longest(self) -> int:
        """The number of tokens that a text can have at most."""
        return self.max_positions - self.first_position


class Embeddings(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.max_positions, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.segments, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.first = config.first_position

    def forward(self, token_ids: Tensor, segments: Tensor) -> Tensor:
        if self.first:  # RoBERTa's. A padding token in the text has a position of its own, and is not counted.
            real = token_ids != self.first - 1
            positions = real.cumsum(1) * real + self.first - 1
        else:
            positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        hidden = self.word_embeddings(token_ids) + self.token_type_embeddings(segments)
        return cast(Tensor, self.LayerNorm(hidden + self.position_embeddings(positions)))


class SelfAttention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads = config.num_heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        batch, tokens, _ = hidden.shape
        q, k, v = (
            project(hidden).view(batch, tokens, self.heads, -1).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(hidden.shape)


class Residual(nn.Module):
    """A projection whose output is added to ``before``, and a layer norm of the sum."""

    def __init__(self, inputs: int, config: BertConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return cast(Tensor, self.LayerNorm(self.dense(x) + before))


class Dense(nn.Module):
    """A projection by itself, which checkpoints name ``dense``."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.dense(x))


class BertAttention(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.self = SelfAttention(config)
        self.output = Residual(config.hidden_size, config)

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        return cast(Tensor, self.output(self.self(hidden, mask), hidden))


class BertLayer(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = BertAttention(config)
        self.intermediate = Dense(config.hidden_size, config.intermediate_size)
        self.output = Residual(config.intermediate_size, config)
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        hidden = self.attention(hidden, mask)
        return cast(Tensor, self.output(self.activation(self.intermediate(hidden)), hidden))


class BertEncoder(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(BertLayer(config) for _ in range(config.num_layers))

    def forward(self, hidden: Tensor, mask: Tensor | None) -> Tensor:
        for layer in self.layer:
            hidden = layer(hidden, mask)
        return hidden


class Bert(nn.Module):
    """An encoder: token ids [batch, tokens] → hidden states [batch, tokens, hidden] of the last layer.

    ``mask`` [batch, tokens] is true for tokens and false for padding, which is at the end. Without padding it may be
    None. ``segments`` [batch, tokens] is 0 for the first text of a pair and 1 for the second. ``pooled`` computes
    BertModel's ``pooler_output``.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = Dense(config.hidden_size, config.hidden_size) if config.pooler else None

    def forward(self, token_ids: Tensor, mask: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        if token_ids.shape[1] > self.config.longest:
            raise ModelError(f"the text has {token_ids.shape[1]} tokens; expected at most {self.config.longest}")
        segments = torch.zeros_like(token_ids) if segments is None else segments
        hidden = self.embeddings(token_ids, segments)
        return cast(Tensor, self.encoder(hidden, None if mask is None else mask.bool()[:, None, None, :]))

    def pooled(self, hidden: Tensor) -> Tensor:
        """Run the trained pooler on each text's first token: hidden [batch, tokens, hidden] → [batch, hidden]."""
        if self.pooler is None:
            raise ModelError("this encoder was made without a pooler; expected BertConfig(pooler=True)")
        return torch.tanh(self.pooler(hidden[:, 0]))

    def rename(self, name: str) -> str | None:
        """Return the parameter for a checkpoint's tensor; None for heads of other tasks and for computed buffers."""
        if name.startswith(_HEADS) or name.endswith(("position_ids", "token_type_ids")):
            return None
        for prefix in _PREFIXES:
            name = name.removeprefix(prefix)
        if name.startswith("pooler.") and self.pooler is None:
            return None
        stem, dot, last = name.rpartition(".")
        return stem + dot + _OLD.get(last, last)
