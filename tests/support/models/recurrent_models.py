"""Tiny random models whose layers keep a state of a fixed size of each sequence, made with transformers' classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_SHAPE = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_LFM2 = {
    "intermediate_size": 96, "conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv", "conv"],
}  # fmt: skip
_LINEAR = {
    "head_dim": 32, "linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
_SHARED = _EXPERTS | {"shared_expert_intermediate_size": 48}
SHAPES: dict[str, dict[str, Any]] = {
    "Lfm2ForCausalLM": _LFM2 | {"block_multiple_of": 32, "conv_bias": True},
    "Lfm2MoeForCausalLM": _LFM2 | _EXPERTS | {"num_dense_layers": 1},
    "Qwen3NextForCausalLM": _LINEAR | _SHARED | {"intermediate_size": 96, "mlp_only_layers": [1]},
    "Qwen3_5ForCausalLM": _LINEAR | {"intermediate_size": 96},
    "Qwen3_5MoeForCausalLM": _LINEAR | _SHARED,
}


def write_recurrent(folder: Path, architecture: str, **changes: Any) -> Path:
    """Save such a model; every number is random, so that none goes unnoticed."""
    import torch
    import transformers

    kind = getattr(transformers, architecture)
    torch.manual_seed(5)
    model = kind(kind.config_class(**_SHAPE | SHAPES[architecture] | changes)).eval()
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.randn_like(value) * 0.3)
    model.save_pretrained(folder)
    return folder


__all__ = ["SHAPES", "write_recurrent"]
