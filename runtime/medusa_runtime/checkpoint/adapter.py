"""LoRA adapters (Hu et al., 2021) in PEFT's format: where the weights are, and what adapter_config.json says."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

from ..errors import ConfigError, CorruptError, MismatchError, json_excerpt
from ..storage.base import scheme_of
from .index import TensorEntry

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")

# Fields of PEFT that are not supported, because they change the adapted layers in another way or change more than them.
# Each has the words for it in a message.
_REFUSED = {
    "use_dora": "DoRA",
    "modules_to_save": "whole modules beside the matrices",
    "lora_bias": "biases of the matrices",
    "fan_in_fan_out": "layers whose weights are transposed (transformers' Conv1D)",
    "trainable_token_indices": "rows of the embedding",
    "target_parameters": "parameters that are not the weight of a linear layer",
    "layer_replication": "replicated layers",
    "megatron_config": "layers of Megatron",
    "alora_invocation_tokens": "activation by tokens (aLoRA)",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal matrices",
    "arrow_config": "routing between adapters",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
}
# With PEFT's other values, the base model's weights were changed when the training began.
_INITIAL_VALUES = (None, True, False, "gaussian", "eva", "orthogonal")
_MOST_PATTERNS = 10_000
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The ranks and scales of an adapter.

    ``ranks`` and ``alphas`` hold exceptions from ``rank`` and ``alpha``, by the name of a module or the end of it. With
    ``rank_stabilized``, products are scaled by the root of the rank (rank-stabilized LoRA). ``targets`` lists the
    adapted modules; it is empty where they are given as a pattern. ``base`` is the base model's name or path, if it is
    known.
    """

    rank: int
    alpha: float
    rank_stabilized: bool
    ranks: Mapping[str, float]
    alphas: Mapping[str, float]
    targets: tuple[str, ...]
    base: str

    @classmethod
    def read(cls, text: bytes | None) -> Self:
        """Parse an adapter_config.json; None if there is none.

        Raises CorruptError for a broken file, and MismatchError for a missing one or an adapter that is not supported.
        """
        if text is None:
            raise MismatchError(f"expected {ADAPTER_CONFIG} beside the adapter's weights, found none")
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError):
            raise CorruptError(f"{ADAPTER_CONFIG}: expected JSON, found something else") from None
        if not isinstance(raw, dict):
            raise CorruptError(f"{ADAPTER_CONFIG}: expected an object, found {json_excerpt(raw)}")
        _check_supported(raw)
        targets = raw.get("target_modules")
        listed = isinstance(targets, list) and all(isinstance(name, str) for name in targets)
        if not listed and not isinstance(targets, str | None):
            raise _wrong("target_modules", "a list of names, or a pattern", targets)
        base = raw.get("base_model_name_or_path")
        rank, ranks = _positive("r", raw.get("r")), _pattern(raw, "rank_pattern")
        for name, value in (("r", rank), *(("rank_pattern", value) for value in ranks.values())):
            if value != int(value):
                raise _wrong(name, "a positive whole number", value)
        return cls(
            rank=int(rank),
            alpha=_positive("lora_alpha", raw.get("lora_alpha")),
            rank_stabilized=bool(raw.get("use_rslora")),
            ranks=ranks,
            alphas=_pattern(raw, "alpha_pattern"),
            targets=tuple(targets) if isinstance(targets, list) else (),
            base=base if isinstance(base, str) else "",
        )

    def rank_of(self, module: str) -> int:
        """Return the rank of a module's matrices. A module is named as in ``model.layers.0.self_attn.q_proj``."""
        return int(_value(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Return the factor for the product of a module's matrices."""
        rank = self.rank_of(module)
        return _value(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.rank_stabilized else rank)


def adapted_modules(config: AdapterConfig, tensors: Mapping[str, TensorEntry]) -> list[str]:
    """Return the modules that an adapter has matrices for.

    Raises MismatchError for a tensor of any other kind, and for a target of the config without matrices.
    """
    modules: dict[str, None] = {}
    for name in tensors:
        if not name.startswith(_PREFIX) or not name.endswith((_A, _B)):
            raise MismatchError(
                f"expected tensors such as {_PREFIX}model.layers.0.self_attn.q_proj{_A}, found {name[:200]!a}"
            )
        modules[name.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B)] = None
    if not modules:
        raise MismatchError("expected matrices for at least one layer, found none")
    endings = [target for target in dict.fromkeys(config.targets) if target not in modules]
    if len(endings) > _MOST_PATTERNS:  # each is compared with each module
        raise MismatchError(
            f"{ADAPTER_CONFIG}: target_modules: expected names of modules, or at most {_MOST_PATTERNS:,} endings of "
            f"them, found {len(endings):,}"
        )
    for target in endings:
        if not any(module.endswith(f".{target}") for module in modules):
            raise MismatchError(
                f"{ADAPTER_CONFIG}: target_modules names {target[:200]!a}, and expected matrices for it; the weights "
                "have none"
            )
    return list(modules)


def matrix_names(module: str) -> tuple[str, str]:
    """Return the names of a module's matrices: A [rank, in_features] and B [out_features, rank]."""
    return f"{_PREFIX}{module}{_A}", f"{_PREFIX}{module}{_B}"


def matrix(tensors: Mapping[str, TensorEntry], name: str, shape: tuple[int, int]) -> TensorEntry:
    """Return the matrix of this name. Raises MismatchError if it is missing, or has another shape or no floats."""
    entry = tensors.get(name)
    if entry is None:
        raise MismatchError(f"expected {name} beside its other matrix, found none")
    if entry.dtype not in _FLOATS:
        raise MismatchError(f"{name}: expected one of {', '.join(_FLOATS)}, found {entry.dtype}")
    if tuple(entry.shape) != shape:
        raise MismatchError(f"{name}: expected {list(shape)}, found {list(entry.shape)}")
    return entry


def check_matrices(config: AdapterConfig, tensors: Mapping[str, TensorEntry]) -> None:
    """Raise MismatchError for matrices that fit no model. Those that do may still not fit the adapter's own."""
    for module in adapted_modules(config, tensors):
        rank, (a, b) = config.rank_of(module), matrix_names(module)
        matrix(tensors, a, (rank, tensors[a].shape[-1] if a in tensors and tensors[a].shape else 0))
        matrix(tensors, b, (tensors[b].shape[0] if b in tensors and tensors[b].shape else 0, rank))


def adapter_urls(url: str) -> tuple[str, ...]:
    """Return the URLs of the files that may hold the adapter at ``url``, which is a folder or a file.

    The first one that exists holds it. Raises ConfigError for a malformed URL.
    """
    scheme = scheme_of(url)
    try:
        parts = urlsplit(url) if scheme else None
    except ValueError:
        raise ConfigError(f"expected the URL or the path of an adapter, found {json_excerpt(url)}") from None
    path = parts.path if parts is not None else url
    if path.endswith((".safetensors", ".bin")):
        return (url,)
    files = tuple(f"{path.rstrip('/')}/{name}" for name in ADAPTER_FILES)
    return files if parts is None else tuple(urlunsplit(parts._replace(path=file)) for file in files)


def _check_supported(raw: Mapping[str, Any]) -> None:
    kind = raw.get("peft_type")
    if kind != "LORA":
        raise MismatchError(f"{ADAPTER_CONFIG}: expected the peft_type LORA, found {json_excerpt(kind)}")
    for name, meaning in _REFUSED.items():
        if raw.get(name):
            raise MismatchError(
                f"{ADAPTER_CONFIG}: expected no {name} ({meaning}), found {json_excerpt(raw[name])}; merge the "
                "adapter into the base model instead"
            )
    if raw.get("bias", "none") != "none":
        raise MismatchError(
            f"{ADAPTER_CONFIG}: expected the bias none, found {json_excerpt(raw['bias'])}; biases stay the base model's"
        )
    initial = raw.get("init_lora_weights")
    if initial not in _INITIAL_VALUES:
        raise MismatchError(
            f"{ADAPTER_CONFIG}: expected init_lora_weights to leave the base model as it is, found "
            f"{json_excerpt(initial)}; expected an adapter that was converted to plain LoRA when it was saved"
        )


def _pattern(raw: Mapping[str, Any], name: str) -> Mapping[str, float]:
    found = raw.get(name) or {}
    if not isinstance(found, dict) or len(found) > _MOST_PATTERNS:
        raise _wrong(name, "an object of modules and numbers", found)
    for key, value in found.items():
        # PEFT accepts regular expressions. In an untrusted file they could take for ever, and most files have names.
        if not re.fullmatch(r"\^?[\w.-]+", key):
            raise _wrong(name, "names of modules", key)
        _positive(name, value)
    return found


def _value(pattern: Mapping[str, float], module: str, default: float) -> float:
    for key, value in pattern.items():
        if module == key.removeprefix("^") or (key[0] != "^" and module.endswith(f".{key}")):
            return value
    return default


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise _wrong(name, "a positive number", value)
    return value


def _wrong(name: str, expected: str, found: Any) -> CorruptError:
    return CorruptError(f"{ADAPTER_CONFIG}: {name}: expected {expected}, found {json_excerpt(found)}")


__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_FILES",
    "AdapterConfig",
    "adapted_modules",
    "adapter_urls",
    "check_matrices",
    "matrix",
    "matrix_names",
]
