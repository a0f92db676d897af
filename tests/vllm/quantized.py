"""Small Llama checkpoints with random weights, plain and as vLLM's quantizations store them, in shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCAB, LAYERS, GROUP = 256, 512, 4, 2, 64, 512, 2, 64
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "group_size": None}
QUANTIZATION: dict[str, dict[str, Any]] = {
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": _INT8 | {"strategy": "channel", "dynamic": False},
                "input_activations": _INT8 | {"strategy": "token", "dynamic": True},
                "output_activations": None,
            }
        },
    },
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}


def write_checkpoint(folder: Path, quantization: str | None = None) -> Path:
    """A checkpoint in two shards; ``quantization`` is None or a key of ``QUANTIZATION``."""
    import torch
    from safetensors.torch import save_file

    dice = torch.Generator().manual_seed(11)
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=dice).bfloat16(),
        "model.norm.weight": torch.ones(HIDDEN).bfloat16(),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=dice).bfloat16(),
    }
    for name, rows, columns in _linears():
        tensors |= {f"{name}.{part}": tensor for part, tensor in _linear(rows, columns, quantization, dice).items()}
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(HIDDEN).bfloat16()
    names = list(tensors)
    places = {}
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, folder / file)
        places |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(_config(quantization)))
    return folder


def _linears() -> list[tuple[str, int, int]]:
    found = []
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}."
        found += [
            (stem + "self_attn.q_proj", HEADS * HEAD, HIDDEN),
            (stem + "self_attn.k_proj", KV_HEADS * HEAD, HIDDEN),
            (stem + "self_attn.v_proj", KV_HEADS * HEAD, HIDDEN),
            (stem + "self_attn.o_proj", HIDDEN, HEADS * HEAD),
            (stem + "mlp.gate_proj", INNER, HIDDEN),
            (stem + "mlp.up_proj", INNER, HIDDEN),
            (stem + "mlp.down_proj", HIDDEN, INNER),
        ]
    return found


def _linear(rows: int, columns: int, quantization: str | None, dice: Any) -> dict[str, Any]:
    import torch

    if quantization == "int8":
        return {
            "weight": torch.randint(-127, 128, (rows, columns), generator=dice, dtype=torch.int8),
            "weight_scale": (torch.rand(rows, 1, generator=dice) * 0.002 + 0.0005).bfloat16(),
        }
    if quantization == "awq":
        words = {"generator": dice, "dtype": torch.int32}
        return {
            "qweight": torch.randint(-(2**31), 2**31 - 1, (columns, rows // 8), **words),
            "qzeros": torch.randint(-(2**31), 2**31 - 1, (columns // GROUP, rows // 8), **words),
            "scales": (torch.rand(columns // GROUP, rows, generator=dice) * 0.01 + 0.002).half(),
        }
    return {"weight": (torch.randn(rows, columns, generator=dice) * 0.06).bfloat16()}


def _config(quantization: str | None) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "vocab_size": VOCAB,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "dtype": "float16" if quantization == "awq" else "bfloat16",
    }
    return config if quantization is None else config | {"quantization_config": QUANTIZATION[quantization]}
