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
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 16}
_OF_KINDS = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
OWN: dict[str, dict[str, Any]] = {  # families that need no transformers
    "Lfm2ForCausalLM": _LFM2 | {"block_multiple_of": 32, "conv_bias": True},
    "Lfm2MoeForCausalLM": _LFM2 | _EXPERTS | {"num_dense_layers": 1},
    "Qwen3NextForCausalLM": _LINEAR | _SHARED | {"intermediate_size": 96, "mlp_only_layers": [1]},
    "Qwen3_5ForCausalLM": _LINEAR | {"intermediate_size": 96},
    "Qwen3_5MoeForCausalLM": _LINEAR | _SHARED,
}
OTHERS: dict[str, dict[str, Any]] = {
    "GraniteMoeHybridForCausalLM": _MAMBA
    | {
        "shared_intermediate_size": 48,
        "intermediate_size": 32,
        "num_local_experts": 4,
        "layer_types": _OF_KINDS,
    },
    "BambaForCausalLM": _MAMBA | {"attn_layer_indices": [1], "intermediate_size": 96},
    "FalconH1ForCausalLM": _MAMBA | {"mamba_d_ssm": 128, "intermediate_size": 96},
    "NemotronHForCausalLM": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 16,
        "head_dim": 16,
        "layers_block_type": ["mamba", "attention", "moe", "mamba"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "n_group": 1,
        "topk_group": 1,
    },
    "JambaForCausalLM": _EXPERTS
    | {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 16,
        "mamba_dt_rank": 8,
        "intermediate_size": 48,
    },
    "OlmoHybridForCausalLM": {
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "intermediate_size": 96,
    },
    "Lfm3ForCausalLM": {"intermediate_size": 96},
    "KimiLinearForCausalLM": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
        "layer_types": _OF_KINDS,
        "intermediate_size": 96,
    },
}
SHAPES = OWN | OTHERS
# Models that take pictures, too, with the decoder inside and the sizes of the rest.
_QWEN_EYES = {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "out_hidden_size": 64,
    "num_position_embeddings": 64,
}  # fmt: skip
PICTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3_5ForConditionalGeneration": ("Qwen3_5ForCausalLM", _QWEN_EYES),
    "Qwen3_5MoeForConditionalGeneration": ("Qwen3_5MoeForCausalLM", _QWEN_EYES),
    "Lfm2VlForConditionalGeneration": (
        "Lfm2ForCausalLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48},
    ),
}


def write_recurrent(folder: Path, architecture: str, **changes: Any) -> Path:
    """Save such a model."""
    import transformers

    kind = getattr(transformers, architecture)
    _save(kind(kind.config_class(**_SHAPE | SHAPES[architecture] | changes)), folder)
    return folder


def write_with_pictures(folder: Path, architecture: str) -> Any:
    """Save a model that takes pictures, too, and return it."""
    import transformers

    decoder, vision = PICTURES[architecture]
    text = getattr(transformers, decoder).config_class(**_SHAPE | OWN[decoder])
    kind = getattr(transformers, architecture)
    return _save(kind(kind.config_class(text_config=text.to_dict(), vision_config=vision)), folder)


def _save(model: Any, folder: Path) -> Any:
    """Save a model with random numbers everywhere, so that none goes unnoticed."""
    import torch

    torch.manual_seed(5)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.copy_(torch.randn_like(value) * 0.3)
    model.eval().save_pretrained(folder)
    return model


__all__ = ["OTHERS", "OWN", "PICTURES", "SHAPES", "write_recurrent", "write_with_pictures"]
