"""The ``quantization_config`` of a config.json: how each module's weight is stored. This module needs no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from medusa_runtime.errors import ConfigError, ModelError, json_excerpt

SUPPORTED = (
    "compressed-tensors (int-quantized, float-quantized, naive-quantized or pack-quantized), gptq, awq (gemm), fp8, "
    "fbgemm_fp8 or mxfp4, and GGUF files"
)
_OTHERS = "or --engine vllm"
_STRATEGIES = ("tensor", "channel", "group", "block")
_DIRECT = ("int-quantized", "float-quantized", "naive-quantized")
_ROTATED = ("q_proj", "k_proj")
_MOST_WAYS = 5e6  # in which an expression may try to match a name
_LONGEST_PATTERN, _LONGEST_NAME = 512, 256
_PACKABLE = (2, 4, 8)  # bits of a value; values fill a byte exactly


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The way in which the weight of a module is stored.

    layout: a key of ``layouts.LAYOUTS``. For "ggml", a weight's dtype says how many bits its values have.
    group: how many columns share a scale. block: how many rows and columns do. With neither, the scale's shape says
        whether it is for the whole tensor or for each row.
    shifted: stored zero points are one too small, as in GPTQ's first format.
    scattered: the columns of a group may lie apart, in a layout whose rows are not copied.
    """

    layout: str
    bits: int
    group: int | None = None
    block: tuple[int, int] | None = None
    symmetric: bool = True
    shifted: bool = False
    scattered: bool = False


@dataclass(frozen=True)
class _Rule:
    """The modules for which a scheme is used; with None as scheme, modules that are not quantized."""

    patterns: tuple[str, ...]
    scheme: Scheme | None

    def matches(self, module: str) -> bool:
        return any(_matches(pattern, module) for pattern in self.patterns)


@dataclass(frozen=True)
class Quantization:
    """The schemes of a checkpoint. ``label`` describes them for people.

    With ``idle_biases`` the checkpoint may have biases for layers that have none.

    rotary_pairs: the numbers of heads of q and of k, if their rows are stored in pairs that are rotated together.
    norm_shift: how much was added to the weights of norms.
    """

    label: str
    rules: tuple[_Rule, ...] = ()
    default: Scheme | None = None
    idle_biases: bool = False
    rotary_pairs: tuple[int, int] | None = None
    norm_shift: float = 0.0

    def scheme(self, module: str) -> Scheme | None:
        """Return the scheme of a module's weight, or None if the weight is not quantized."""
        for rule in self.rules:
            if rule.matches(module):
                return rule.scheme
        return self.default

    def paired_heads(self, name: str) -> int | None:
        """Return the number of heads of a tensor whose rows are stored in rotary pairs; None for other tensors."""
        module = name.rpartition(".")[0].rpartition(".")[2]
        if self.rotary_pairs is None or module not in _ROTATED:
            return None
        return self.rotary_pairs[_ROTATED.index(module)]

    def shift(self, name: str) -> float:
        """Return how much was added to a tensor's values."""
        return self.norm_shift if name.endswith("norm.weight") else 0.0

    def is_changed(self, name: str) -> bool:
        """Return whether a tensor is stored with other values or in another order, so that a module needs a copy."""
        return self.paired_heads(name) is not None or self.shift(name) != 0

    def __str__(self) -> str:
        return self.label

    @classmethod
    def of(cls, config: Mapping[str, Any], where: str = "config.json") -> Quantization | None:
        """Return the quantization that a parsed config.json describes, or None for weights that are not quantized.

        Raises ModelError for a method, a format or an option that is not supported, and ConfigError.
        """
        key = next((key for key in ("quantization_config", "compression_config") if config.get(key) is not None), None)
        if key is None:
            return None
        raw = config[key]
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{where}: expected {key} to be an object, found {raw!r}")
        reader = _Reader(raw, f"{where}: {key}")
        method = raw.get("quant_method", "compressed-tensors" if key == "compression_config" else None)
        if not isinstance(method, str) or method not in METHODS:
            raise reader.error("quant_method", SUPPORTED, method)
        found = METHODS[method](reader)
        for rule in found.rules:
            rule.matches("")  # so that an expression that is not valid is an error now
        return found


class _Reader:
    """Reads the values of one JSON object, and raises an error that names the key if a value has another form."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def error(self, name: str, expected: str, found: object) -> ModelError:
        shown = "nothing" if found is None else repr(found)
        return ModelError(f"{self.where}: expected {name} to be {expected} {_OTHERS}, found {shown}")

    def get(self, *names: str) -> Any:
        return next((self.raw[name] for name in names if self.raw.get(name) is not None), None)

    def bits(self, *names: str, known: tuple[int, ...]) -> int:
        value = self.get(*names)
        if isinstance(value, bool) or not isinstance(value, int) or value not in known:
            raise self.error(names[0], " or ".join(map(str, known)), value)
        return value

    def group(self, *names: str) -> int | None:
        """Return the number of columns in a group; None for -1, which means the whole row."""
        value = self.get(*names)
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
            raise self.error(names[0], "a positive number of columns, or -1", value)
        return None if value == -1 else value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.error(name, "true or false", value)
        return default if value is None else value

    def one_of(self, name: str, known: tuple[str, ...], default: str | None = None) -> str:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, str) or value.lower() not in known:
            raise self.error(name, " or ".join(known), value)
        return value.lower()

    def names(self, *keys: str) -> tuple[str, ...]:
        value = self.get(*keys)
        if value is not None and (not isinstance(value, list) or not all(isinstance(one, str) for one in value)):
            raise self.error(keys[0], "a list of names", value)
        return tuple(value or ())

    def block(self, name: str, value: object) -> tuple[int, int]:
        if isinstance(value, list) and len(value) == 2 and all(type(one) is int and one > 0 for one in value):
            return value[0], value[1]
        raise self.error(name, "two positive numbers, of rows and columns", value)

    def inside(self, name: str, value: object) -> _Reader:
        if not isinstance(value, Mapping):
            raise self.error(name, "an object", value)
        return _Reader(value, f"{self.where}.{name}")


def _compressed(reader: _Reader) -> Quantization:
    """Read a config of compressed-tensors: groups of modules, each with a scheme. Its activations' part is ignored."""
    sparse = reader.get("sparsity_config")
    if sparse and reader.inside("sparsity_config", sparse).get("format") not in (None, "dense"):
        raise reader.error("sparsity_config", "absent, or of format dense,", sparse)
    transforms = reader.get("transform_config")
    if transforms and reader.inside("transform_config", transforms).get("config_groups"):
        raise reader.error("transform_config", "absent", transforms)
    groups = reader.get("config_groups")
    rules = [_Rule(reader.names("ignore"), None)]
    labels = []
    for name, group in reader.inside("config_groups", groups).raw.items():
        inner = reader.inside(f"config_groups.{name}", group)
        weights = inner.get("weights")
        if weights is None:
            continue
        form = inner.get("format") or reader.get("format")
        if form not in (*_DIRECT, "pack-quantized"):
            raise reader.error("format", ", ".join((*_DIRECT, "pack-quantized")), form)
        scheme = _compressed_scheme(inner.inside("weights", weights), str(form))
        rules.append(_Rule(inner.names("targets"), scheme))
        labels.append(f"{form}, {scheme.bits} bits")
    if not labels:
        raise reader.error("config_groups", "groups of modules with weights", groups)
    # A module that is named goes before one of its class.
    rules[1:] = [
        *(_Rule(tuple(p for p in r.patterns if p != "Linear"), r.scheme) for r in rules[1:]),
        *(_Rule(("Linear",), r.scheme) for r in rules[1:] if "Linear" in r.patterns),
    ]
    label = f"compressed-tensors ({'; '.join(dict.fromkeys(labels))})"
    return Quantization(label, tuple(rules))


def _compressed_scheme(weights: _Reader, form: str) -> Scheme:
    number = weights.one_of("type", ("int", "float"), "int")
    packed = form == "pack-quantized"
    bits = weights.bits("num_bits", known=_PACKABLE if packed else (8,) if number == "float" else (2, 3, 4, 5, 6, 7, 8))
    if packed and number == "float":
        raise weights.error("type", "int for pack-quantized", number)
    strategy = weights.one_of("strategy", _STRATEGIES, "tensor" if weights.get("group_size") in (None, -1) else "group")
    return Scheme(
        layout="pack" if packed else "direct",
        bits=bits,
        group=weights.group("group_size") if strategy == "group" else None,
        block=weights.block("block_structure", weights.get("block_structure")) if strategy == "block" else None,
        symmetric=weights.flag("symmetric", True),
        scattered=weights.get("actorder") in ("group", True),
    )


def _gptq(reader: _Reader) -> Quantization:
    form = reader.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    if reader.get("is_marlin_format"):
        raise reader.error("is_marlin_format", "false", True)
    reader.one_of("pack_dtype", ("int32",), "int32")
    bits, group = reader.bits("bits", known=_PACKABLE), reader.group("group_size")
    scheme = Scheme(layout="gptq", bits=bits, group=group, symmetric=False, shifted=form == "gptq")
    rules = []
    dynamic = reader.get("dynamic")
    for pattern, options in (reader.inside("dynamic", dynamic).raw if dynamic else {}).items():
        sign, _, rest = pattern.partition(":")
        if sign == "-":
            rules.append(_Rule((f"re:{rest}",), None))
            continue
        inner = reader.inside(f"dynamic.{pattern}", options)
        own = replace(
            scheme,
            bits=inner.bits("bits", known=_PACKABLE) if "bits" in inner.raw else bits,
            group=inner.group("group_size") if "group_size" in inner.raw else group,
        )
        rules.append(_Rule((f"re:{rest if sign == '+' else pattern}",), own))
    return Quantization(f"gptq, {bits} bits", tuple(rules), scheme, idle_biases=True)


def _awq(reader: _Reader) -> Quantization:
    reader.one_of("version", ("gemm",), "gemm")
    bits = reader.bits("bits", "w_bit", known=(4,))
    group = reader.group("group_size", "q_group_size")
    return Quantization(f"awq, {bits} bits", default=Scheme(layout="awq", bits=bits, group=group, symmetric=False))


def _fp8(reader: _Reader) -> Quantization:
    sizes = reader.get("weight_block_size")
    block = None if sizes is None else reader.block("weight_block_size", sizes)
    return Quantization(str(reader.raw["quant_method"]), default=Scheme(layout="direct", bits=8, block=block))


def _mxfp4(reader: _Reader) -> Quantization:
    return Quantization("mxfp4", default=Scheme(layout="mxfp4", bits=4, group=32))


def _gguf(reader: _Reader) -> Quantization:
    """Read what ``checkpoint.gguf.config`` wrote."""
    pairs = reader.get("rotary_pairs")
    return Quantization(
        f"gguf ({', '.join(reader.names('types'))})",
        default=Scheme(layout="ggml", bits=8),
        rotary_pairs=None if pairs is None else reader.block("rotary_pairs", pairs),
        norm_shift=float(reader.get("norm_shift") or 0),
    )


METHODS: dict[str, Callable[[_Reader], Quantization]] = {
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
    "gguf": _gguf,
}


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        found = _expression(pattern[3:])
        if len(module) > _LONGEST_NAME:
            raise ConfigError(
                f"expected names of modules of at most {_LONGEST_NAME} characters, found {json_excerpt(module)}"
            )
        return found.match(module) is not None
    return pattern in (module, "Linear")


@lru_cache(maxsize=4096)
def _expression(pattern: str) -> re.Pattern[str]:
    """Compile a pattern from a checkpoint, which may be hostile, as may the names that it is matched with.

    Raises ConfigError for a pattern that is not valid, or could take practically for ever to match.
    """
    where = "config.json: quantization_config"
    try:
        found = re.compile(pattern)
        parsed = re._parser.parse(pattern)  # type: ignore[attr-defined]
        if pattern.endswith(".*") and "REPEAT" in str(parsed[-1][0]):
            parsed = parsed[:-1]  # it matches at the first attempt
        ways = _ways(parsed)
    except (re.error, OverflowError, RecursionError, ValueError) as error:
        raise ConfigError(
            f"{where}: expected a regular expression, found {json_excerpt(f're:{pattern}')} ({error})"
        ) from None
    if ways > _MOST_WAYS or len(pattern) > _LONGEST_PATTERN:
        raise ConfigError(
            f"{where}: expected a regular expression of at most {_LONGEST_PATTERN} characters with about three "
            f"repetitions, none within another, found {json_excerpt(f're:{pattern}')}"
        )
    return found


def _ways(parsed: Any) -> float:
    """Return in how many ways a parsed expression may try to match a name, at worst.

    Each repetition counts as a hundred.
    """
    ways = 1.0
    for operation, argument in parsed:
        inner = [_ways(part) for part in _parts(argument) if isinstance(part, re._parser.SubPattern)]  # type: ignore[attr-defined]
        if "REPEAT" in str(operation):
            times = min(argument[1], 100)
            ways *= (times + 1) * min(inner[0], 1e6) ** min(times, 40)
        elif "BRANCH" in str(operation):
            ways *= sum(inner)
        else:
            for each in inner:
                ways *= each
        ways = min(ways, 1e300)
    return ways


def _parts(argument: Any) -> Iterator[Any]:
    """Yield an operation's argument, and if it is a list, what is in it."""
    yield argument
    if isinstance(argument, tuple | list):
        for part in argument:
            yield from _parts(part)


__all__ = ["METHODS", "SUPPORTED", "Quantization", "Scheme"]
