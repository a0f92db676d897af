"""Small random models that also take pictures, as transformers saves them; text is served of their decoders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

TEXT = {
    "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 128, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
_HEADS = TEXT | {"head_dim": 16}
_EYES = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
    "image_size": 16,
}  # fmt: skip
_QWEN_EYES = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": 64,
}  # fmt: skip
_QWEN3_EYES = _QWEN_EYES | {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
_LLAMA4_EYES = _EYES | {
    "intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
}  # fmt: skip
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
_YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
# The family, its text_config and its vision_config.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3", _HEADS | {"sliding_window": 5, "sliding_window_pattern": 3}, _EYES),
    "qwen2-vl": ("Qwen2VL", TEXT | _MROPE, {**_QWEN_EYES, "embed_dim": 32, "hidden_size": 64}),
    "qwen2.5-vl": ("Qwen2_5_VL", TEXT | _MROPE, _QWEN_EYES),
    "qwen3-vl": ("Qwen3VL", _HEADS | _MROPE, _QWEN3_EYES),
    "qwen3-vl-moe": ("Qwen3VLMoe", _HEADS | _MROPE | _MIXTURE, _QWEN3_EYES),
    "qwen3.5": ("Qwen3_5", _HEADS | _LINEAR, _QWEN3_EYES),
    "mistral3": ("Mistral3", _HEADS | {"model_type": "mistral", "sliding_window": None},
                 _EYES | {"model_type": "pixtral"}),
    "ministral3": ("Mistral3", _HEADS | {"model_type": "ministral3", "rope_parameters": _YARN},
                   _EYES | {"model_type": "pixtral"}),
    "llama4": (
        "Llama4",
        _HEADS | {"intermediate_size_mlp": 48, "num_local_experts": 4, "interleave_moe_layer_step": 2,
                  "attention_chunk_size": 64},
        _LLAMA4_EYES,
    ),
    "llava": ("Llava", _HEADS | {"model_type": "llama"}, _EYES | {"model_type": "clip_vision_model"}),
    "internvl": ("InternVL", _HEADS | {"model_type": "qwen3"}, _EYES | {"image_size": [16, 16], "patch_size": [4, 4]}),
    "lfm2-vl": (
        "Lfm2Vl",
        _HEADS | {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
        _EYES | {"model_type": "siglip2_vision_model", "num_patches": 16},
    ),
}  # fmt: skip
_IMAGE_TOKENS = (
    "image_token_id", "video_token_id", "image_token_index", "vision_start_token_id", "vision_end_token_id",
    "boi_token_index", "eoi_token_index",
)  # fmt: skip


def write(case: str, folder: Path, dtype: torch.dtype = torch.float32, *, eyes: int = 0, **options: Any) -> Any:
    """Save a random model to ``folder``, and return it. ``eyes`` is another width of what takes pictures."""
    import transformers  # some environments of the tests are without it

    family, text, vision = CASES[case]
    kind = getattr(transformers, f"{family}ForConditionalGeneration")
    wide = {"intermediate_size": eyes} if eyes else {}
    config = kind.config_class(text_config=dict(text), vision_config=vision | wide, **dict.fromkeys(_IMAGE_TOKENS, 96))
    torch.manual_seed(len(case))
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.25 + (1.0 if "norm" in name else 0.0))
    if dtype != torch.float32:  # to which complex numbers are not converted without a warning
        model = model.to(dtype)
    model.save_pretrained(folder, **options)
    return model


def by_transformers(model: Any, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that the whole model generates behind a prompt of text."""
    ids = torch.tensor([prompt])
    # Llama 4's whole model fails without a picture in transformers 5.24.
    whole = model.language_model if type(model).__name__.startswith("Llama4") else model
    out = whole.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
        do_sample=False, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def flat(folder: Path) -> None:
    """Rewrite a config.json as Qwen2-VL's were published: with the decoder's keys at the top level."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    old = {"rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}, "rope_theta": rope["rope_theta"]}
    path.write_text(json.dumps(text | raw | old))


__all__ = ["CASES", "TEXT", "by_transformers", "flat", "write"]
