"""The small files of a checkpoint that an engine reads."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from ..checkpoint.index import WeightIndex
from ..checkpoint.text_part import text_config
from ..errors import CorruptError, ModelError
from ..models import ModelConfig, model_config
from ..models.backend import no_config
from ..models.base import DTYPES
from ..models.fields import ReadFile, read_object, token_ids

_HEADS = ("lm_head.weight", "embed_out.weight", "output_projection.weight")  # the others: GPT-NeoX, BioGPT
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors' name → config.json's


def read_config(
    read: ReadFile, index: WeightIndex, dtype: str = "auto", max_model_len: int | None = None
) -> ModelConfig:
    """Read config.json. Raises MismatchError if there is none, CorruptError, and what ``model_config`` raises.

    ``dtype`` is the setting: a name that config.json may have, too, or "auto" for what it has. A config without any
    gets the weights' dtype: the usual default, float32, would double a bf16 model's memory. ``max_model_len`` is the
    setting, too.
    """
    raw = with_dtype(text_config(read_config_json(read)), index)
    if _has_own_head(index):
        raw["tie_word_embeddings"] = False
    config = model_config(raw)
    config.check_generates()
    chosen = config.dtype if dtype == "auto" else DTYPES[dtype]
    return replace(config, dtype=chosen, max_model_len=max_model_len)


def with_dtype(raw: dict[str, Any], index: WeightIndex) -> dict[str, Any]:
    """Return the fields of a config.json with the weights' dtype if they name none."""
    if raw.get("dtype") is None and raw.get("torch_dtype") is None:
        return raw | {"dtype": weights_dtype(index)}
    return raw


def _has_own_head(index: WeightIndex) -> bool:
    """Return whether a checkpoint stores the output's weights apart from the embeddings', which they may differ from.

    Then config.json may still say that they are tied. As in transformers since version 5, they are not.
    """
    head = next((entry for name, entry in index.tensors.items() if name.endswith(_HEADS)), None)
    if head is None:
        return False
    alike = [entry for entry in index.tensors.values() if entry.shape == head.shape and entry is not head]
    return bool(alike) and not any((one.shard, one.start) == (head.shard, head.start) for one in alike)


def read_config_json(read: ReadFile) -> dict[str, Any]:
    """Read config.json, and return its fields unchanged. Raises MismatchError if there is none, and CorruptError."""
    raw = read_object(read, "config.json")
    if raw is None:
        raise no_config()
    return raw


def weights_dtype(index: WeightIndex) -> str:
    """Return the dtype of most of the weights' bytes, such as "bfloat16".

    It is also "bfloat16" if the weights have only dtypes that cannot be computed in, such as fp8.
    """
    sizes: Counter[str] = Counter()
    for entry in index.tensors.values():
        if entry.dtype in _DTYPES:
            sizes[entry.dtype] += entry.stop - entry.start
    return _DTYPES[sizes.most_common(1)[0][0]] if sizes else "bfloat16"


def read_eos_token_ids(read: ReadFile, config: ModelConfig) -> tuple[int, ...]:
    """Return the end-of-sequence ids of config.json and generation_config.json together, sorted.

    Often only one of the two files has the token that ends a turn of a chat. Ids outside the vocabulary are left out:
    some files have them. Raises CorruptError.
    """
    raw = (read_object(read, "generation_config.json") or {}).get("eos_token_id")
    found = token_ids(raw)
    if found is None:
        raise CorruptError(f"generation_config.json: expected eos_token_id to be a token id or a list, found {raw!r}")
    return tuple(sorted(token for token in {*config.eos_token_ids, *found} if token < config.vocab_size))


def added_end(read: ReadFile) -> str | None:
    """Return the token that tokenizer_config.json puts behind each text (``add_eos_token``); None if there is none.

    transformers adds it, whatever tokenizer.json says. Raises CorruptError.
    """
    raw = read_object(read, "tokenizer_config.json") or {}
    token = raw.get("eos_token")
    content = token.get("content") if isinstance(token, dict) else token
    return content if raw.get("add_eos_token") is True and isinstance(content, str) and content else None


def check_for_gpu(config: ModelConfig) -> None:
    """Raise ModelError for a model that this engine runs on CPUs only."""
    if config.is_foreign:
        raise ModelError(
            f"{config.architecture} runs by transformers, which the torch engine does on CPUs only; expected "
            "--device cpu, or --engine vllm"
        )
    if config.states:
        raise ModelError(
            f"{config.architecture} has layers that keep a state of each sequence, which the torch engine runs on CPUs "
            "only; expected --device cpu, or --engine vllm"
        )
    if config.has_experts:
        raise ModelError(
            f"{config.architecture} has experts, which the torch engine runs on CPUs only; expected --device cpu, or "
            "--engine vllm"
        )
    if config.quantization is not None:
        raise ModelError(
            f"the weights are quantized ({config.quantization}), which the torch engine runs on CPUs only; "
            "expected --device cpu, or --engine vllm"
        )
