"""Small random models of transformers, for each of our families, and the same checkpoints as our loader reads them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from medusa_runtime.checkpoint.header import header_bytes, parse_header
from medusa_runtime.checkpoint.index import Shard, WeightIndex
from medusa_runtime.engine.checkpoint_files import read_config
from medusa_runtime.load.loader import Loader
from medusa_runtime.models import DecoderModel
from medusa_runtime.models.layers.whole import WholeAttention
from medusa_runtime.region.reader import Region, file_version
from torch import Tensor

os.environ.setdefault("HF_HUB_OFFLINE", "1")

PROMPT = [5, 17, 2, 88, 41, 41, 9, 60, 3, 71, 12, 33, 90, 7, 54, 29]
SHAPE = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
GATED = SHAPE | {"intermediate_size": 48, "max_position_embeddings": 64, "num_key_value_heads": 2}
MOE = GATED | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

GEMMA3 = GATED | {"head_dim": 16, "sliding_window": 5, "sliding_window_pattern": 3}
GPT_OSS = GATED | {"head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 5}


def scaled(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **parameters}}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-untied": ("Llama", GATED),
    "llama-tied": ("Llama", GATED | {"tie_word_embeddings": True}),
    "llama-mha-biases": ("Llama", GATED | {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": ("Llama", GATED | {"head_dim": 16, "rms_norm_eps": 1e-3, "hidden_act": "gelu_pytorch_tanh"}),
    "llama-linear": ("Llama", GATED | scaled("linear", factor=2.5)),
    "llama-llama3": ("Llama", GATED | scaled("llama3", **LLAMA3)),
    "llama-yarn": ("Llama", GATED | scaled("yarn", factor=4.0, original_max_position_embeddings=16)),
    "llama-yarn-tuned": (
        "Llama",
        GATED | scaled("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8, beta_slow=2,
                       mscale=0.7, mscale_all_dim=1.3, truncate=False),
    ),
    "llama-dynamic": ("Llama", GATED | scaled("dynamic", factor=2.0)),
    "mistral": ("Mistral", GATED | {"sliding_window": None}),
    "mistral-window": ("Mistral", GATED | {"sliding_window": 5}),
    "qwen2": ("Qwen2", GATED),
    "qwen2-window": (
        "Qwen2", GATED | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", GATED | {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-window": (
        "Qwen3",
        GATED | {"head_dim": 8, "attention_bias": True, "use_sliding_window": True, "sliding_window": 4,
                 "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "mixtral": ("Mixtral", GATED | {"num_local_experts": 4}),
    "mixtral-window": ("Mixtral", GATED | {"num_local_experts": 4, "num_experts_per_tok": 1, "sliding_window": 5}),
    "qwen2-moe": ("Qwen2Moe", MOE | {"shared_expert_intermediate_size": 24}),
    "qwen2-moe-some-layers": (
        "Qwen2Moe", MOE | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2, "qkv_bias": False},
    ),
    "qwen3-moe": ("Qwen3Moe", MOE | {"head_dim": 8, "norm_topk_prob": True}),
    "qwen3-moe-some-layers": ("Qwen3Moe", MOE | {"head_dim": 16, "mlp_only_layers": [1], "norm_topk_prob": False}),
    "qwen2-moe-window": (
        "Qwen2Moe", MOE | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3-moe-window": (
        "Qwen3Moe", MOE | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3-head-scale": ("Gemma3", GEMMA3 | {"query_pre_attn_scalar": 16}),
    "gemma3-tuned": (
        "Gemma3",
        GEMMA3 | {"layer_types": ["full_attention", "sliding_attention", "full_attention"], "attention_bias": True,
                  "tie_word_embeddings": False, "final_logit_softcapping": 2.0, "query_pre_attn_scalar": 40,
                  "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 20.0},
                                      "full_attention": {"rope_type": "linear", "factor": 2.5, "rope_theta": 500.0}}},
    ),
    "gpt-oss": ("GptOss", GPT_OSS),
    "gpt-oss-full": (
        "GptOss",
        GPT_OSS | {"layer_types": ["full_attention"] * 3, "attention_bias": False, "swiglu_limit": 0.5,
                   "swiglu_alpha": 1.1} | scaled("linear", factor=2.5),
    ),
    "opt": ("OPT", SHAPE | {"ffn_dim": 48, "max_position_embeddings": 64}),
    "opt-350m": (
        "OPT",
        SHAPE | {"ffn_dim": 48, "do_layer_norm_before": False, "word_embed_proj_dim": 16},
    ),
    "opt-plain": (
        "OPT",
        SHAPE | {"ffn_dim": 48, "enable_bias": False, "layer_norm_elementwise_affine": False,
                 "activation_function": "gelu", "tie_word_embeddings": False},
    ),
    "falcon-7b": ("Falcon", SHAPE | {"multi_query": True}),
    "falcon-40b": ("Falcon", SHAPE | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon-11b": (
        "Falcon",
        SHAPE | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1,
                 "ffn_hidden_size": 80, "tie_word_embeddings": False},
    ),
    "falcon-serial": ("Falcon", SHAPE | {"multi_query": False, "parallel_attn": False, "bias": True}),
}  # fmt: skip
# Models that run by transformers' code.
FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", GATED | {"head_dim": 16}),
    "gemma2": ("Gemma2", GATED | {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16}),
    "phi3": ("Phi3", GATED),
    "phi3-longrope": (
        "Phi3",
        GATED | {"original_max_position_embeddings": 16, "hidden_size": 64}
        | scaled("longrope", short_factor=[1.0, 1.5, 2.0, 2.5, 3.0, 3.5], long_factor=[2.0, 2.5, 3.0, 4.0, 5.0, 6.0],
                 partial_rotary_factor=0.75, original_max_position_embeddings=16),
    ),
    "smollm3": ("SmolLM3", GATED | {"num_hidden_layers": 5}),
}  # fmt: skip


def reference(case: str, folder: Path, dtype: torch.dtype, **options: Any) -> Any:
    """A random model of transformers, saved to ``folder``; every parameter is random, so that none goes unnoticed."""
    import transformers  # some environments of the tests are without it

    family, values = CASES.get(case) or FOREIGN[case]
    kind = getattr(transformers, f"{family}ForCausalLM")
    config = kind.config_class(**values, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(len(case))
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25 + (1.0 if "norm" in name or "ln_" in name else 0.0))
    model = model.to(dtype)
    model.save_pretrained(folder, **options)
    return model


@contextlib.contextmanager
def loaded(folder: Path, dtype: torch.dtype | None = None) -> Iterator[DecoderModel]:
    """The same checkpoint through our index, region and loader."""
    shards, headers = [], []
    for path in sorted(folder.glob("*.safetensors")):
        status = path.stat()
        with open(path, "rb") as file:
            start = header_bytes(path.name, file.read(8), status.st_size)
            headers.append(parse_header(path.name, file.read(start - 8), status.st_size - start))
        shards.append(Shard(path.name, status.st_size, start, file_version(status), str(path)))
    region = Region.create()
    writer = region.writer()
    writer.lay_out(WeightIndex.from_headers(shards, headers), {})
    for chunk in writer.pending():
        writer.publish(chunk)
    writer.finish()
    config = read_config(lambda name: (folder / name).read_bytes(), region.wait_index())
    model = config.model()
    with Loader(region, model.applier(dtype or config.dtype)) as loader:
        loader.wait()
    yield model
    region.close()


def logits(model: DecoderModel, tokens: list[int]) -> Tensor:
    positions = torch.arange(len(tokens))
    hidden = model.embed(torch.tensor(tokens), positions)
    return model.logits(model.run_layers(hidden, positions, WholeAttention()))
