"""The small files of a checkpoint that an engine reads."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..checkpoint.index import WeightIndex
from ..errors import CorruptError
from ..models import ModelConfig, model_config
from ..models.backend import no_config
from ..models.fields import read_object
from ..region.reader import Region

_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # safetensors' name → config.json's


def read_config(region: Region) -> ModelConfig:
    """config.json. Raises MismatchError without one, CorruptError, and what ``model_config`` raises.

    A config that names no dtype gets that of the weights; float32 would double a bf16 model's memory.
    """
    raw = read_config_json(region)
    if raw.get("dtype") is None and raw.get("torch_dtype") is None:
        raw["dtype"] = weights_dtype(region.wait_index())
    return model_config(raw)


def read_config_json(region: Region) -> dict[str, Any]:
    """config.json as it is. Raises MismatchError without one, CorruptError."""
    raw = read_object(region.file, "config.json")
    if raw is None:
        raise no_config()
    return raw


def weights_dtype(index: WeightIndex) -> str:
    """The dtype most of the weights' bytes have; bfloat16 where none can be computed in (fp8)."""
    sizes: Counter[str] = Counter()
    for entry in index.tensors.values():
        if entry.dtype in _DTYPES:
            sizes[entry.dtype] += entry.stop - entry.start
    return _DTYPES[sizes.most_common(1)[0][0]] if sizes else "bfloat16"


def read_eos_token_ids(region: Region, config: ModelConfig) -> tuple[int, ...]:
    """The ids in config.json and generation_config.json together: often only one of them has the turn's end.

    Some files name ids that the model has no row for, such as -1 for none.
    """
    raw = (read_object(region.file, "generation_config.json") or {}).get("eos_token_id")
    found = raw if isinstance(raw, list) else [] if raw is None else [raw]
    if not all(isinstance(token, int) for token in found):
        raise CorruptError(f"generation_config.json: expected eos_token_id to be a token id or a list, found {raw!r}")
    return tuple(sorted(token for token in {*config.eos_token_ids, *found} if 0 <= token < config.vocab_size))
