"""The configuration of a model that transformers runs, read with transformers' own configuration class."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from ...errors import ConfigError, ModelError
from ...imports.lean_transformers import import_from_transformers
from ..base import ModelConfig, dtype_in, sees_later_tokens
from ..fields import QUANTIZED, Fields
from ..sizes import EXPERTS, MOST_LAYERS, POSITIONS, check_sizes
from .catalog import TransformersClass, find_class

if TYPE_CHECKING:
    from .decoder import TransformersDecoder


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(ModelConfig):
    """The configuration of a decoder of transformers.

    ``raw`` is the parsed config.json, and ``found_class`` the class that runs the model.
    """

    is_foreign: ClassVar[bool] = True
    raw: Mapping[str, Any]
    found_class: TransformersClass

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        """Read a parsed config.json.

        Raises the errors of ``catalog.find_class``, ConfigError for a config.json that transformers refuses or
        that has layers of types which the class has no code for, and ModelError for layers of different sizes.
        """
        found = find_class(raw)
        config = own_config(found, raw)
        try:
            return cls._of_class(found, config, raw)
        except RuntimeError as error:  # transformers' for an attribute that each layer has for itself
            text = str(error).partition(". ")[0]
            raise ModelError(
                f"{found.name}: expected layers of the same sizes, for which the torch engine has a cache, found: "
                f"{text}; expected another model, or --engine vllm"
            ) from error

    @classmethod
    def _of_class(cls, found: TransformersClass, config: Any, raw: Mapping[str, Any]) -> Self:
        fields = Fields(raw)
        if fields.get("is_causal") is False:
            raise sees_later_tokens()
        heads, hidden = getattr(config, "num_attention_heads", None), config.hidden_size
        if not isinstance(heads, int):
            raise without_cache(found.name, "no layer that attends")
        if config.num_hidden_layers > MOST_LAYERS:  # under another name
            raise fields.error("num_hidden_layers", f"at most {MOST_LAYERS}", config.num_hidden_layers)
        _check_layer_types(found, config, fields)
        if (kv_heads := _kv_heads(config, heads)) < 1 or heads % kv_heads:
            raise fields.error("num_key_value_heads", f"a divisor of the {heads} attention heads", kv_heads)
        chosen = getattr(config, "num_experts_per_tok", None)
        experts = next((count for name in EXPERTS if type(count := getattr(config, name, None)) is int), 0)
        if experts > 0 and type(chosen) is int and not 0 < chosen <= experts:
            raise fields.error("num_experts_per_tok", f"1 to {experts}, the number of experts", chosen)
        return cls(
            architecture=found.name,
            vocab_size=config.vocab_size,
            hidden_size=hidden,
            num_layers=config.num_hidden_layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=_head_dim(config, hidden, heads),
            max_positions=next(
                (value for name in POSITIONS if isinstance(value := getattr(config, name, None), int)), 2048
            ),
            tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
            dtype=dtype_in(fields),
            eos_token_ids=fields.ids("eos_token_id"),
            windows=(None,) * config.num_hidden_layers,
            quantization=fields.quantization(),
            raw=raw,
            found_class=found,
        )

    def model(self) -> TransformersDecoder:
        from .decoder import TransformersDecoder

        return TransformersDecoder(self)


def verify(raw: Mapping[str, Any]) -> None:
    """Raise an error if something is wrong with the config.json of a model that transformers runs."""
    found = find_class(raw)
    if found.kind == "decoder":
        TransformersConfig.of(raw)
    else:
        Fields(raw).quantization()
        own_config(found, raw)


def without_cache(name: str, found: str) -> ModelError:
    """Return the error for a model of a class with this name, whose keys and values the engine has no cache for."""
    return ModelError(
        f"{name}: expected layers that attend, each with keys and values of its own, for which the torch engine has a "
        f"cache, found {found}; expected another model, or --engine vllm"
    )


def own_class(found: TransformersClass) -> Any:
    """Import and return the class itself, with only the parts of transformers that it needs."""
    return getattr(import_from_transformers(found.module), found.name)


def own_config(found: TransformersClass, raw: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of a model. Raises ConfigError if transformers does not accept config.json."""
    check_sizes(raw)
    kind = own_class(found).config_class
    try:
        return kind.from_dict({name: _numbers(value) for name, value in raw.items() if name not in QUANTIZED})
    except Exception as error:
        raise refused(found.name, error) from error


def _numbers(value: Any) -> Any:
    """Return a value of a config.json with the numbers that JSON lacks, which transformers writes as objects."""
    if isinstance(value, dict):
        if {*value} == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {name: _numbers(one) for name, one in value.items()}
    return [_numbers(one) for one in value] if isinstance(value, list) else value


def _check_layer_types(found: TransformersClass, config: Any, fields: Fields) -> None:
    """Raise ConfigError for a type of layer that a class has no code for, which its first forward would not find.

    Such a class has a mask for each type, by the name that stands in its source. transformers itself only checks that
    one of its classes has the type.
    """
    source = Path(str(sys.modules[own_class(found).__module__].__file__)).read_text()
    types = list(dict.fromkeys(getattr(config, "layer_types", None) or ()))
    if "mask_mapping[" not in source:  # it does not look at the types
        return
    own = dict.fromkeys(re.findall(r'"(\w+_attention)"', source))
    if own and (unknown := [one for one in types if f'"{one}"' not in source]):
        raise fields.error("layer_types", f"of {' or '.join(own)}, which {found.name} has", unknown[0])


def refused(name: str, error: Exception) -> ConfigError:
    """Return the error for a config.json with which transformers' class of this name fails."""
    text = " ".join(str(error).split())
    return ConfigError(f"config.json: expected one that transformers accepts for {name}, found: {text}")


def _kv_heads(config: Any, heads: int) -> int:
    if getattr(config, "kv_lora_rank", None):  # latent attention: once computed, each head has its own keys
        return heads
    multi_query = getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False)
    if multi_query:
        return 1
    return int(
        next((n for name in ("num_key_value_heads", "num_kv_heads") if (n := getattr(config, name, None))), heads)
    )


def _head_dim(config: Any, hidden: int, heads: int) -> int:
    if getattr(config, "kv_lora_rank", None):
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim)
    found = getattr(config, "head_dim", None) or hidden // heads
    if not isinstance(found, int):
        raise ModelError(f"config.json: expected head_dim to be one number for all layers, found {found}")
    return found


__all__ = ["TransformersConfig", "own_class", "own_config", "refused", "without_cache"]
