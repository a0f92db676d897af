"""The text part of a checkpoint that also takes pictures or sound: the decoder inside.

For text alone, all of these models compute what their decoder computes. The torch engine serves them so, without the
rest of their weights; vLLM gets them as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import ConfigError, ModelError, short_repr
from .index import WeightIndex
from .text_names import text_name


class _Decoder(NamedTuple):
    """A decoder inside. ``defaults`` are transformers' values for keys that published files leave out."""

    architecture: str
    defaults: Mapping[str, Any] = {}


# By the model_type of the text_config.
_DECODERS: dict[str, _Decoder] = {
    "gemma3_text": _Decoder(
        "Gemma3ForCausalLM", {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}
    ),
    "lfm2": _Decoder("Lfm2ForCausalLM"),
    "llama": _Decoder(
        "LlamaForCausalLM",
        {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
         "num_attention_heads": 32},
    ),
    "llama4_text": _Decoder("Llama4ForCausalLM"),
    "ministral3": _Decoder("Ministral3ForCausalLM"),
    "mistral": _Decoder("MistralForCausalLM"),
    "qwen2": _Decoder("Qwen2ForCausalLM"),
    "qwen2_vl_text": _Decoder("Qwen2ForCausalLM"),
    "qwen2_5_vl_text": _Decoder("Qwen2ForCausalLM"),
    "qwen3": _Decoder("Qwen3ForCausalLM"),
    "qwen3_moe": _Decoder("Qwen3MoeForCausalLM"),
    "qwen3_vl_text": _Decoder("Qwen3ForCausalLM"),
    "qwen3_vl_moe_text": _Decoder("Qwen3MoeForCausalLM", {"norm_topk_prob": True}),
    "qwen3_5_text": _Decoder("Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": _Decoder("Qwen3_5MoeForCausalLM"),
}  # fmt: skip
# The architectures around them. The value is the model_type of the decoder in files that have its keys at the top
# level, as Qwen2-VL's were published.
WHOLES: dict[str, str | None] = {
    "Gemma3ForConditionalGeneration": None,
    "InternVLForConditionalGeneration": None,
    "Lfm2VlForConditionalGeneration": None,
    "Llama4ForConditionalGeneration": None,
    "LlavaForConditionalGeneration": None,
    "Mistral3ForConditionalGeneration": None,
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    "Qwen3VLForConditionalGeneration": None,
    "Qwen3VLMoeForConditionalGeneration": None,
    "Qwen3_5ForConditionalGeneration": None,
    "Qwen3_5MoeForConditionalGeneration": None,
}
# Keys of the whole that count for its decoder, too, also where the text_config has others.
_FROM_WHOLE = ("eos_token_id", "quantization_config", "compression_config", "tie_word_embeddings")


def has_text_part(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of a model whose decoder is served by itself."""
    return _whole(raw) is not None


def text_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the decoder inside a model that also takes pictures or sound; another one as it is.

    Raises ConfigError for a text_config that is absent or no object, and ModelError for an unknown decoder.
    """
    whole = _whole(raw)
    if whole is None:
        return dict(raw)
    text, kind = raw.get("text_config"), WHOLES[whole]
    if text is None and kind is not None and raw.get("hidden_size") is not None:
        text = {key: value for key, value in raw.items() if not key.endswith("_config")} | {"model_type": kind}
    if not isinstance(text, Mapping):
        found = "nothing" if text is None else short_repr(text)
        raise ConfigError(f"config.json: expected text_config to be an object with the decoder's keys, found {found}")
    kind = text.get("model_type", kind)
    decoder = _DECODERS.get(kind) if isinstance(kind, str) else None
    if decoder is None:
        raise ModelError(
            f"config.json: expected the model_type of text_config to be one of {', '.join(_DECODERS)}, found "
            f"{'nothing' if kind is None else short_repr(kind)}; expected another model, or --engine vllm"
        )
    inner = dict(decoder.defaults) | {key: value for key, value in text.items() if value is not None}
    inner |= {key: None for key, value in text.items() if value is None and key not in inner}  # null: not the default
    inner |= {key: raw[key] for key in _FROM_WHOLE if raw.get(key) is not None}
    for key in ("dtype", "torch_dtype"):
        if raw.get(key) is not None and not {"dtype", "torch_dtype"} & inner.keys():
            inner[key] = raw[key]
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(inner.get(key), Mapping):
            inner[key] = _plain_rope(inner[key])
    return inner | {"architectures": [decoder.architecture]}


def only_text(index: WeightIndex, config: bytes | None) -> WeightIndex:
    """Return the index of a checkpoint with this config.json, without tensors that its text part does not need."""
    try:
        raw = json.loads(config or b"{}")
    except (ValueError, RecursionError):  # the engine says what is wrong
        return index
    if not isinstance(raw, dict) or not has_text_part(raw):
        return index
    tensors = {name: entry for name, entry in index.tensors.items() if text_name(name) is not None}
    order = [name for name in index.order if name in tensors]
    return WeightIndex(index.shards, tensors, order, recorded=index.recorded)


def _whole(raw: Mapping[str, Any]) -> str | None:
    named = raw.get("architectures")
    names = named if isinstance(named, list) else []
    return next((name for name in names if isinstance(name, str) and name in WHOLES), None)


def _plain_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rope for text, of which each token has one position, from one with three positions for pictures."""
    found = {key: value for key, value in rope.items() if key not in ("mrope_section", "mrope_interleaved")}
    return found | {key: "default" for key in ("type", "rope_type") if found.get(key) == "mrope"}


__all__ = ["WHOLES", "has_text_part", "only_text", "text_config"]
