"""The metadata of a GGUF file as the config.json that transformers has for the same model."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import CorruptError, ModelError, short_repr
from ..header import HeaderEntry
from .architectures import Architecture
from .metadata import Metadata

_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_GEMMA_27B = {"gemma2": 46, "gemma3": 62}  # the layers of the largest models
_POOLINGS = {1: "mean", 2: "cls", 3: "lasttoken"}
_SIZE, _EXPERT_SIZE = "feed_forward_length", "expert_feed_forward_length"


def config(
    metadata: Metadata,
    found: Architecture,
    tensors: Mapping[str, HeaderEntry],
    rope_factors: Mapping[str, Sequence[float]],
) -> dict[str, Any]:
    """Return the config.json of a file. ``tensors`` are those of its header, and of all its other parts.

    ``rope_factors`` are the numbers by which rotary frequencies are divided (``ROPE_FACTORS``), if the file has any.
    """
    heads = metadata.count("attention.head_count")
    kv_heads = metadata.count("attention.head_count_kv", heads)
    hidden, layers = metadata.count("embedding_length"), metadata.count("block_count")
    head_dim = metadata.count("attention.key_length", max(hidden // heads, 1))
    rotated = metadata.count("rope.dimension_count", head_dim)
    if rotated != head_dim and metadata.architecture != "phi3":
        key = f"{metadata.architecture}.rope.dimension_count"
        raise ModelError(
            f"{metadata.name}: expected {key} to be {head_dim}, the size of a head, found {rotated}; the torch engine "
            "rotates whole heads of this architecture"
        )
    if "token_embd.weight" not in tensors or len(tensors["token_embd.weight"].shape) != 2:
        raise CorruptError(f"{metadata.name}: expected a matrix token_embd.weight, found none; is a part missing?")
    raw: dict[str, Any] = {
        "architectures": [found.name],
        "model_type": found.model_type,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": metadata.count(_SIZE if metadata.has(_SIZE) else _EXPERT_SIZE),
        "max_position_embeddings": metadata.count("context_length"),
        "rms_norm_eps": metadata.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": _dtype(tensors),
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "rope_theta": metadata.number("rope.freq_base", 10000.0),
        "quantization_config": _quantization(found, tensors, heads, kv_heads),
    }
    for name, key in _TOKENS.items():
        raw[name] = metadata.token_id(f"tokenizer.ggml.{key}", raw["vocab_size"])
    if scaling := _rope_scaling(metadata, rope_factors):
        raw["rope_scaling"] = scaling
        if (original := scaling.get("original_max_position_embeddings")) is not None:
            raw["original_max_position_embeddings"] = original  # where Phi-3 has it
    if metadata.has("attention.sliding_window"):
        raw["sliding_window"] = metadata.count("attention.sliding_window")
    if rotated != head_dim:
        raw["partial_rotary_factor"] = rotated / head_dim
    if metadata.architecture in ("gemma2", "gemma3"):
        raw |= _gemma(metadata, layers, hidden // heads if layers == _GEMMA_27B[metadata.architecture] else head_dim)
    if metadata.has("expert_count"):
        raw |= _experts(metadata, found, layers, tensors)
    return raw


def pooling_files(metadata: Metadata) -> dict[str, bytes]:
    """Return sentence-transformers' files for a model that makes embeddings (``pooling_type``); none for others.

    Raises ModelError for a way of pooling that is not supported.
    """
    if not metadata.has("pooling_type"):
        return {}
    kind = metadata.count("pooling_type")
    if kind not in _POOLINGS:
        known = ", ".join(f"{number} ({name})" for number, name in _POOLINGS.items())
        raise ModelError(
            f"{metadata.name}: {metadata.architecture}.pooling_type is {kind}, which is not supported; expected "
            f"{known}, or 0 for a model that writes text"
        )
    modules = [{"type": "Transformer", "path": ""}, {"type": "Pooling", "path": "1_Pooling"}, {"type": "Normalize"}]
    pooling = json.dumps({"pooling_mode": _POOLINGS[kind]}).encode()
    return {"modules.json": json.dumps(modules).encode(), "1_Pooling/config.json": pooling}


def _dtype(tensors: Mapping[str, HeaderEntry]) -> str:
    """Return the dtype to compute in: that of most matrices, or bfloat16 if these are in blocks."""
    found = _types(tensors)
    return _DTYPES.get(found[0], "bfloat16") if found else "bfloat16"


def _types(tensors: Mapping[str, HeaderEntry]) -> list[str]:
    """Return the types of matrices, the one with the most bytes first."""
    sizes = Counter[str]()
    for entry in tensors.values():
        if len(entry.shape) > 1:
            sizes[entry.dtype] += entry.stop - entry.start
    return [kind for kind, _ in sizes.most_common()]


def _quantization(found: Architecture, tensors: Mapping[str, HeaderEntry], heads: int, kv_heads: int) -> dict[str, Any]:
    return {
        "quant_method": "gguf",
        "types": _types(tensors),
        "rotary_pairs": [heads, kv_heads] if found.has_rotary_pairs else None,
        "norm_shift": found.norm_shift,
    }


def _rope_scaling(metadata: Metadata, factors: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return how frequencies are scaled. Llama 3's parameters are not in the file, but the factors that they yield."""
    if factors:
        original = metadata.count("rope.scaling.original_context_length", metadata.count("context_length"))
        fixed = {"attention_factor": 1.0} if metadata.architecture == "llama" else {}
        return {"rope_type": "longrope", "original_max_position_embeddings": original} | fixed | dict(factors)
    kind = metadata.text(f"{metadata.architecture}.rope.scaling.type")
    if kind in (None, "none"):
        return {}
    if kind not in ("linear", "yarn"):
        key = f"{metadata.architecture}.rope.scaling.type"
        raise ModelError(f"{metadata.name}: expected {key} to be none, linear or yarn, found {short_repr(kind)}")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": metadata.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = metadata.count("rope.scaling.original_context_length")
        for name, key in (
            ("attention_factor", "yarn_attn_factor"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
        ):
            if metadata.has(f"rope.scaling.{key}"):
                scaling[name] = metadata.number(f"rope.scaling.{key}")
    return scaling


def _gemma(metadata: Metadata, layers: int, scaled_by: int) -> dict[str, Any]:
    """Return the keys of Gemma 2 and 3. The files do not say by what scores are scaled; Gemma's code does."""
    raw: dict[str, Any] = {"query_pre_attn_scalar": scaled_by}
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if metadata.has(key):
            raw[key] = metadata.number(key)
    if metadata.architecture == "gemma2":
        return raw
    slides = [False] * layers
    if metadata.has("attention.sliding_window"):
        every, slides_of = 6, metadata.flags("attention.sliding_window_pattern")
        if slides_of is None:
            every = metadata.count("attention.sliding_window_pattern", every)
        slides = slides_of or [(layer + 1) % every != 0 for layer in range(layers)]
    raw["rope_local_base_freq"] = metadata.number("rope.freq_base_swa", 10000.0)
    raw["layer_types"] = ["sliding_attention" if slide else "full_attention" for slide in slides]
    return raw


def _experts(
    metadata: Metadata, found: Architecture, layers: int, tensors: Mapping[str, HeaderEntry]
) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "num_local_experts": metadata.count("expert_count"),
        "num_experts": metadata.count("expert_count"),
        "num_experts_per_tok": metadata.count("expert_used_count"),
    }
    if found.model_type == "mixtral":
        return raw
    raw |= {
        "moe_intermediate_size": metadata.count(_EXPERT_SIZE),
        "norm_topk_prob": metadata.architecture == "qwen3moe",
        "mlp_only_layers": [layer for layer in range(layers) if f"blk.{layer}.ffn_gate_inp.weight" not in tensors],
    }
    if metadata.architecture == "qwen2moe":
        raw["shared_expert_intermediate_size"] = metadata.count("expert_shared_feed_forward_length")
    return raw


__all__ = ["config"]
