"""Llama 2 and 3, and families that differ only by a bias, a norm or a window: Mistral, Yi, Qwen2, Qwen2.5, Qwen3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

from torch import Tensor, nn

from medusa_runtime.checkpoint.text_names import text_name
from medusa_runtime.kernels import silu_gate
from medusa_runtime.models.base import Attention, DecoderModel, ModelConfig, StateShape
from medusa_runtime.models.fields import Fields
from medusa_runtime.models.layers.activation import ACTIVATIONS
from medusa_runtime.models.layers.embedding import Embedding
from medusa_runtime.models.layers.linear import Linear, project
from medusa_runtime.models.layers.norm import RMSNorm
from medusa_runtime.models.layers.rope import Rope, RopeConfig, Rotation
from medusa_runtime.models.programs import Programs


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(ModelConfig):
    norm_once: ClassVar[bool] = False  # whether norms round only their results

    intermediate_size: int
    norm_eps: float
    activation: str
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    rope: RopeConfig

    @classmethod
    def read(cls, architecture: str, fields: Fields) -> Self:
        fields = with_defaults(architecture, fields)
        common = cls.common(architecture, fields, tied=False)
        qwen2, qwen3 = architecture.startswith("Qwen2"), architecture.startswith("Qwen3")
        bias = fields.flag("attention_bias", default=False)
        windows = _windows(architecture, fields, common["num_layers"])
        if common["sees_later"]:  # transformers' windows in both directions include the token at their length
            windows = tuple(window and window + 1 for window in windows)
        common["windows"] = windows
        return cls(
            **common,
            intermediate_size=fields.count("intermediate_size"),
            norm_eps=fields.number("rms_norm_eps", default=1e-6),
            activation=fields.choice("hidden_act", ACTIVATIONS, default="silu"),
            qkv_bias=bias if not qwen2 else architecture == "Qwen2ForCausalLM" or fields.flag("qkv_bias", default=True),
            output_bias=bias and not qwen2,
            mlp_bias=fields.flag("mlp_bias", default=False),
            qk_norm=qwen3,
            rope=RopeConfig.read(fields, head_dim=common["head_dim"], max_positions=common["max_positions"]),
        )

    def construct(self) -> Llama:
        return Llama(self)

    def norm(self) -> RMSNorm:
        """Construct a norm of hidden states."""
        return RMSNorm(self.hidden_size, self.norm_eps, once=self.norm_once)

    def attention(self, index: int) -> SelfAttention:
        """Construct the attention of a layer."""
        return SelfAttention(self, index)

    def mlp(self, index: int) -> nn.Module:
        """Construct what comes behind the attention in a layer."""
        return GatedMLP(self, self.intermediate_size)


_KINDS = ("full_attention", "sliding_attention")
# The defaults of transformers' configurations where they are not those of Llama's. A key that says how large a tensor
# is, or how many there are, is better missed.
_LFM2 = {"max_position_embeddings": 128_000, "rope_theta": 1e6}
_QWEN = {"max_position_embeddings": 32768, "sliding_window": 4096}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "MistralForCausalLM": {"max_position_embeddings": 131072, "sliding_window": 4096},
    "MixtralForCausalLM": {
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_experts_per_tok": 2,
    },
    "Qwen2ForCausalLM": _QWEN,
    "Qwen3ForCausalLM": _QWEN | {"head_dim": 128},
    "Qwen2MoeForCausalLM": _QWEN,
    "Qwen3MoeForCausalLM": _QWEN,
    "Gemma3ForCausalLM": {"max_position_embeddings": 131072, "sliding_window": 4096, "head_dim": 256},
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": _LFM2 | {"num_experts_per_tok": 4, "norm_topk_prob": True},
    "Qwen3NextForCausalLM": _QWEN | {"head_dim": 256, "norm_topk_prob": True},
    "Qwen3_5ForCausalLM": _QWEN | {"head_dim": 256},
    "Qwen3_5MoeForCausalLM": _QWEN | {"head_dim": 256, "norm_topk_prob": True},
    "GptOssForCausalLM": {
        "max_position_embeddings": 131072, "sliding_window": 128, "head_dim": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0, "attention_bias": True,
    },
}  # fmt: skip


def with_defaults(architecture: str, fields: Fields) -> Fields:
    """Return the fields of a config.json with transformers' values for keys that are absent. A null stays null."""
    return Fields(_DEFAULTS.get(architecture, {}) | dict(fields.raw), fields.where)


def layer_windows(fields: Fields, slides: Sequence[bool]) -> tuple[int | None, ...]:
    """Return the sliding window of each layer that has one, by ``layer_types`` or, if these are absent, ``slides``."""
    kinds = fields.names("layer_types") or [_KINDS[one] for one in slides]
    if len(kinds) != len(slides) or not {*kinds} <= {*_KINDS}:
        raise fields.error("layer_types", f"{len(slides)} times {' or '.join(_KINDS)}", kinds)
    window = fields.count("sliding_window") if "sliding_attention" in kinds else None
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def layers_that_attend(fields: Fields, other: str, attends: Sequence[bool]) -> list[bool]:
    """Return which layers attend: by ``layer_types``, where the others are called ``other``, or if absent ``attends``.

    Raises ConfigError for other names, and if no layer attends, as the engine needs one for its KV cache.
    """
    kinds = fields.names("layer_types") or ["full_attention" if one else other for one in attends]
    if len(kinds) != len(attends) or not {*kinds} <= {"full_attention", other} or "full_attention" not in kinds:
        expected = f"{len(attends)} times full_attention or {other}, with at least one full_attention"
        raise fields.error("layer_types", expected, kinds)
    return [kind == "full_attention" for kind in kinds]


def stateful(attends: Sequence[bool], shapes: tuple[StateShape, ...]) -> dict[str, Any]:
    """Return ``kv_layers`` and ``states`` of a configuration whose layers attend, or keep states of these shapes."""
    if all(attends):
        return {}
    return {
        "kv_layers": tuple(layer for layer, one in enumerate(attends) if one),
        "states": tuple(() if one else shapes for one in attends),
    }


def _windows(architecture: str, fields: Fields, layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer. Mixtral and Qwen3-MoE have one for all layers, others for some."""
    qwen = architecture.startswith("Qwen")
    mistral = architecture in ("MistralForCausalLM", "MixtralForCausalLM")
    if not (mistral or (qwen and fields.flag("use_sliding_window", default=False))):
        return (None,) * layers
    has_window = bool(fields.get("sliding_window"))  # null means none
    if architecture in ("MixtralForCausalLM", "Qwen3MoeForCausalLM"):
        return (fields.count("sliding_window") if has_window else None,) * layers
    bound = fields.index("max_window_layers", default=28) if qwen else 0
    slides = [i < bound and i % 2 == 0 if architecture == "Qwen2MoeForCausalLM" else i >= bound for i in range(layers)]
    return layer_windows(fields, [has_window and one for one in slides])


class SelfAttention(nn.Module):
    """Grouped-query attention with rope. Qwen3 applies a norm to each head of q and k before the rope."""

    FUSED = (("q_proj", "k_proj", "v_proj"),)

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        self.index = index
        self.window = config.windows[index]
        self.q_shape = (-1, config.num_heads, size)
        self.kv_shape = (-1, config.num_kv_heads, size)
        self.scale = size**-0.5
        self.q_proj = Linear(hidden, config.num_heads * size, bias=config.qkv_bias)
        self.k_proj = Linear(hidden, config.num_kv_heads * size, bias=config.qkv_bias)
        self.v_proj = Linear(hidden, config.num_kv_heads * size, bias=config.qkv_bias)
        self.o_proj = Linear(config.num_heads * size, hidden, bias=config.output_bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(size, config.norm_eps)
            self.k_norm = RMSNorm(size, config.norm_eps)

    def forward(self, normed: Tensor, hidden: Tensor | None, rotation: Rotation, attention: Attention) -> Tensor:
        """Return the attention over ``normed``, plus ``hidden`` if there is one."""
        q, k, v = project(normed, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = q.view(self.q_shape), k.view(self.kv_shape), v.view(self.kv_shape)
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotation(q, k)
        out = self.attend(attention, q, k, v)
        return cast(Tensor, self.o_proj(out.reshape(normed.shape[0], -1), hidden))

    def attend(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention.attend(self.index, q, k, v, scale=self.scale, window=self.window)


class GatedMLP(nn.Module):
    """A gated perceptron: SwiGLU (Shazeer, 2020) when the activation is SiLU."""

    FUSED = (("gate_proj", "up_proj"),)

    def __init__(self, config: LlamaConfig, size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, size, bias=config.mlp_bias)
        self.up_proj = Linear(config.hidden_size, size, bias=config.mlp_bias)
        self.down_proj = Linear(size, config.hidden_size, bias=config.mlp_bias)
        self.activation = ACTIVATIONS[config.activation]
        self.silu = self.activation is ACTIVATIONS["silu"]

    def forward(self, normed: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Return the network's output for ``normed``, plus ``hidden`` if there is one."""
        gate, up = project(normed, self.gate_proj, self.up_proj)
        gated = silu_gate(gate, up) if self.silu else self.activation(gate) * up
        return cast(Tensor, self.down_proj(gated, hidden))


class LlamaLayer(nn.Module):
    def __init__(self, config: LlamaConfig, index: int, programs: Programs | None = None) -> None:
        super().__init__()
        self.programs = programs or Programs()
        self.input_layernorm = config.norm()
        self.self_attn = config.attention(index)
        self.post_attention_layernorm = config.norm()
        self.mlp = config.mlp(index)

    def forward(self, hidden: Tensor, rotation: Rotation, attention: Attention) -> Tensor:
        def plainly() -> Tensor:
            attended = self.self_attn(self.input_layernorm(hidden), hidden, rotation, attention)
            return cast(Tensor, self.mlp(self.post_attention_layernorm(attended), attended))

        return cast(Tensor, self.programs.run(self, hidden, attention, rotation, plainly))


class Llama(DecoderModel):
    config_class: ClassVar[type[LlamaConfig]] = LlamaConfig
    embedding_modules: ClassVar[tuple[str, ...]] = ("embed_tokens",)

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.rope = Rope(config.rope)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        programs = Programs()
        self.layers = nn.ModuleList(LlamaLayer(config, index, programs) for index in range(config.num_layers))
        self.norm = config.norm()
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        return cast(Tensor, self.embed_tokens(token_ids))

    def prepare(self, hidden: Tensor, positions: Tensor, attention: Attention) -> Rotation:
        return self.rope.rotation(positions, hidden.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        return cast(Tensor, self.lm_head(self.norm(hidden)))

    def rename(self, name: str) -> str | None:
        if name.endswith("rotary_emb.inv_freq"):  # early checkpoints contain this computed buffer
            return None
        named = text_name(name)
        return None if named is None else named.removeprefix("model.")
