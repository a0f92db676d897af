"""The shapes of real models: the tensors of a checkpoint of each, and its config.json."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

# The last two are of bytes, whatever the checkpoint's dtype: values of MXFP4 and their scales.
Kind = Literal["normal", "ones", "zeros", "blocks", "scales"]


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    kind: Kind = "normal"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Shape:
    """The shape of a model. ``family`` is the ``model_type`` of config.json, and ``extra`` more keys for that file.

    Of ``experts``, ``chosen`` compute each token.
    """

    family: Literal["llama", "mistral", "qwen2", "qwen3", "opt", "falcon", "gpt_oss"]
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False
    head_dim: int | None = None
    context: int = 4096
    experts: int = 0
    chosen: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors in execution order, with the names that transformers gives them."""
        own = {"opt": self._opt, "falcon": self._falcon, "gpt_oss": self._gpt_oss}
        return own.get(self.family, self._llama)()

    def config(self) -> dict[str, Any]:
        common = {"model_type": self.family, "hidden_size": self.hidden, "num_hidden_layers": self.layers}
        common |= {"num_attention_heads": self.heads, "vocab_size": self.vocabulary, "tie_word_embeddings": self.tied}
        common |= {"bos_token_id": 0, "eos_token_id": 0, "use_cache": True}
        if self.family == "opt":
            own: dict[str, Any] = {
                "architectures": ["OPTForCausalLM"],
                "ffn_dim": self.intermediate,
                "word_embed_proj_dim": self.hidden,
                "max_position_embeddings": self.context,
                "do_layer_norm_before": True,
                "activation_function": "relu",
                "pad_token_id": 1,
            }
        elif self.family == "falcon":
            own = {"architectures": ["FalconForCausalLM"], "multi_query": True, "parallel_attn": True, "bias": False}
            own |= {"new_decoder_architecture": False, "alibi": False, "ffn_hidden_size": self.intermediate}
            own |= {"layer_norm_epsilon": 1e-5, "max_position_embeddings": self.context}
        elif self.family == "gpt_oss":
            own = {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
            own |= {"num_local_experts": self.experts, "num_experts_per_tok": self.chosen, "sliding_window": 128}
            own |= {"intermediate_size": self.intermediate, "num_key_value_heads": self.kv_heads}
            own |= {"head_dim": self.head_dim, "max_position_embeddings": self.context, "rms_norm_eps": 1e-5}
            own |= {"rope_theta": 150000, "rope_scaling": _GPT_OSS_ROPE, "attention_bias": True, "pad_token_id": 1}
        else:
            own = {
                "architectures": [f"{self.family.capitalize()}ForCausalLM"],
                "intermediate_size": self.intermediate,
                "num_key_value_heads": self.kv_heads,
                "max_position_embeddings": self.context,
                "rms_norm_eps": 1e-6,
                "rope_theta": 10000.0,
                "hidden_act": "silu",
            }
            if self.head_dim:
                own["head_dim"] = self.head_dim
        return {**common, **own, **self.extra}

    def _llama(self) -> Iterator[Tensor]:
        head_dim = self.head_dim or self.hidden // self.heads
        rows = {"q": self.heads * head_dim, "k": self.kv_heads * head_dim, "v": self.kv_heads * head_dim}
        yield Tensor("model.embed_tokens.weight", (self.vocabulary, self.hidden))
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            yield Tensor(f"{at}.input_layernorm.weight", (self.hidden,), "ones")
            for name, count in rows.items():
                yield Tensor(f"{at}.self_attn.{name}_proj.weight", (count, self.hidden))
                if self.family == "qwen2":
                    yield Tensor(f"{at}.self_attn.{name}_proj.bias", (count,), "zeros")
            if self.family == "qwen3":
                yield Tensor(f"{at}.self_attn.q_norm.weight", (head_dim,), "ones")
                yield Tensor(f"{at}.self_attn.k_norm.weight", (head_dim,), "ones")
            yield Tensor(f"{at}.self_attn.o_proj.weight", (self.hidden, rows["q"]))
            yield Tensor(f"{at}.post_attention_layernorm.weight", (self.hidden,), "ones")
            yield Tensor(f"{at}.mlp.gate_proj.weight", (self.intermediate, self.hidden))
            yield Tensor(f"{at}.mlp.up_proj.weight", (self.intermediate, self.hidden))
            yield Tensor(f"{at}.mlp.down_proj.weight", (self.hidden, self.intermediate))
        yield Tensor("model.norm.weight", (self.hidden,), "ones")
        if not self.tied:
            yield Tensor("lm_head.weight", (self.vocabulary, self.hidden))

    def _gpt_oss(self) -> Iterator[Tensor]:
        head_dim = self.head_dim or self.hidden // self.heads
        projections = {
            "gate_up_proj": (2 * self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }
        yield Tensor("model.embed_tokens.weight", (self.vocabulary, self.hidden))
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            yield Tensor(f"{at}.input_layernorm.weight", (self.hidden,), "ones")
            yield Tensor(f"{at}.self_attn.sinks", (self.heads,))
            for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
                yield from _linear(f"{at}.self_attn.{name}_proj", heads * head_dim, self.hidden)
            yield from _linear(f"{at}.self_attn.o_proj", self.hidden, self.heads * head_dim)
            yield Tensor(f"{at}.post_attention_layernorm.weight", (self.hidden,), "ones")
            yield from _linear(f"{at}.mlp.router", self.experts, self.hidden)
            for name, (rows, columns) in projections.items():
                blocks = (self.experts, rows, columns // 32)
                yield Tensor(f"{at}.mlp.experts.{name}_blocks", (*blocks, 16), "blocks")
                yield Tensor(f"{at}.mlp.experts.{name}_scales", blocks, "scales")
                yield Tensor(f"{at}.mlp.experts.{name}_bias", blocks[:2], "zeros")
        yield Tensor("model.norm.weight", (self.hidden,), "ones")
        yield Tensor("lm_head.weight", (self.vocabulary, self.hidden))

    def _opt(self) -> Iterator[Tensor]:
        yield Tensor("model.decoder.embed_tokens.weight", (self.vocabulary, self.hidden))
        yield Tensor("model.decoder.embed_positions.weight", (self.context + 2, self.hidden))  # OPT's offset
        for layer in range(self.layers):
            at = f"model.decoder.layers.{layer}"
            yield from _norm(f"{at}.self_attn_layer_norm", self.hidden)
            for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
                yield from _linear(f"{at}.self_attn.{name}", self.hidden, self.hidden)
            yield from _norm(f"{at}.final_layer_norm", self.hidden)
            yield from _linear(f"{at}.fc1", self.intermediate, self.hidden)
            yield from _linear(f"{at}.fc2", self.hidden, self.intermediate)
        yield from _norm("model.decoder.final_layer_norm", self.hidden)

    def _falcon(self) -> Iterator[Tensor]:
        head_dim = self.hidden // self.heads
        yield Tensor("transformer.word_embeddings.weight", (self.vocabulary, self.hidden))
        for layer in range(self.layers):
            at = f"transformer.h.{layer}"
            yield from _norm(f"{at}.input_layernorm", self.hidden)
            yield Tensor(f"{at}.self_attention.query_key_value.weight", (self.hidden + 2 * head_dim, self.hidden))
            yield Tensor(f"{at}.self_attention.dense.weight", (self.hidden, self.hidden))
            yield Tensor(f"{at}.mlp.dense_h_to_4h.weight", (self.intermediate, self.hidden))
            yield Tensor(f"{at}.mlp.dense_4h_to_h.weight", (self.hidden, self.intermediate))
        yield from _norm("transformer.ln_f", self.hidden)
        if not self.tied:
            yield Tensor("lm_head.weight", (self.vocabulary, self.hidden))


def _norm(name: str, size: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (size,), "ones")
    yield Tensor(f"{name}.bias", (size,), "zeros")


def _linear(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (rows, columns))
    yield Tensor(f"{name}.bias", (rows,), "zeros")


_LLAMA3_ROPE = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_ROPE |= {"original_max_position_embeddings": 8192}
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_GPT_OSS_ROPE |= {"original_max_position_embeddings": 4096}

SHAPES = {
    # Made for the benchmarks and tests, with their sizes in bf16.
    "llama-57m": Shape("llama", 8, 512, 1472, 8, 4, 4096),
    "llama-55m": Shape("llama", 16, 512, 576, 8, 4, 1024, tied=True),  # the next one's layers, much smaller
    "llama-1.6g": Shape("llama", 16, 2048, 6272, 32, 8, 8192, tied=True),
    "tiny-llama": Shape("llama", 2, 64, 160, 4, 2, 384),
    "tiny-qwen2": Shape("qwen2", 2, 64, 160, 4, 2, 384, tied=True),
    "tiny-qwen3": Shape("qwen3", 2, 64, 160, 4, 2, 384, head_dim=32),
    "tiny-opt": Shape("opt", 2, 64, 256, 4, 4, 384, tied=True, context=128),
    "tiny-falcon": Shape("falcon", 2, 64, 256, 4, 1, 384, tied=True),
    "tiny-gpt-oss": Shape("gpt_oss", 2, 64, 96, 4, 2, 384, head_dim=16, context=256, experts=4, chosen=2),
    # four of the layers of the one with 20 billion parameters, and fewer tokens in its vocabulary
    "gpt-oss-4l": Shape("gpt_oss", 4, 2880, 2880, 64, 8, 32768, head_dim=64, context=131072, experts=32, chosen=4),
    # Real ones, by the sizes in their published config.json.
    "llama-1b": Shape(
        "llama", 16, 2048, 8192, 32, 8, 128256, tied=True, head_dim=64, context=131072,
        extra={"rope_theta": 500000.0, "rope_scaling": _LLAMA3_ROPE, "rms_norm_eps": 1e-5},
    ),
    "llama-3-8b": Shape(
        "llama", 32, 4096, 14336, 32, 8, 128256, context=8192, extra={"rope_theta": 500000.0, "rms_norm_eps": 1e-5}
    ),
    "llama-2-7b": Shape("llama", 32, 4096, 11008, 32, 32, 32000, extra={"rms_norm_eps": 1e-5}),
    "mistral-7b": Shape(
        "mistral", 32, 4096, 14336, 32, 8, 32000, context=32768, extra={"sliding_window": 4096, "rms_norm_eps": 1e-5}
    ),
    "qwen2.5-0.5b": Shape(
        "qwen2", 24, 896, 4864, 14, 2, 151936, tied=True, context=32768, extra={"rope_theta": 1000000.0}
    ),
    "qwen2.5-1.5b": Shape(
        "qwen2", 28, 1536, 8960, 12, 2, 151936, tied=True, context=32768, extra={"rope_theta": 1000000.0}
    ),
    "qwen3-0.6b": Shape(
        "qwen3", 28, 1024, 3072, 16, 8, 151936, tied=True, head_dim=128, context=40960,
        extra={"rope_theta": 1000000.0},
    ),
    "opt-125m": Shape("opt", 12, 768, 3072, 12, 12, 50272, tied=True, context=2048),
    "opt-1.3b": Shape("opt", 24, 2048, 8192, 32, 32, 50272, tied=True, context=2048),
    "falcon-7b": Shape("falcon", 32, 4544, 18176, 71, 1, 65024, tied=True, context=2048),
    "gpt-oss-20b": Shape("gpt_oss", 24, 2880, 2880, 64, 8, 201088, head_dim=64, context=131072, experts=32, chosen=4),
    "gpt-oss-120b": Shape("gpt_oss", 36, 2880, 2880, 64, 8, 201088, head_dim=64, context=131072, experts=128, chosen=4),
}  # fmt: skip
