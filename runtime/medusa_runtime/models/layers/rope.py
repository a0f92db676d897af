"""Rotary position embeddings (Su et al., 2021), and ways to stretch them beyond the trained length.

There is no table. The cosines and sines of a step are computed from its positions, once for all layers, in about 20 µs.
So a rope holds no memory, has no longest position, and needs nothing from the checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from medusa_runtime.errors import ModelError
from medusa_runtime.kernels import rotate
from medusa_runtime.models.fields import Fields

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


class Rotation(NamedTuple):
    """The cosines and sines of one step's tokens, each [tokens, 1, rotated]; the first half of ``sin`` is negated."""

    cos: Tensor
    sin: Tensor

    def __call__(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate the first ``rotated`` dimensions of q and k [tokens, heads, head_dim]; may overwrite both."""
        return rotate(q, k, self.cos, self.sin)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """The rope that a config.json describes, with the names used there.

    ``kind`` is one of KINDS, and ``size`` the number of dimensions of a head. Frequencies are divided by the
    ``factors`` of a longrope. Those of a dynamic rope are the default ones: they change behind ``max_positions`` alone,
    where no engine lets a sequence go.
    """

    kind: str
    size: int
    theta: float
    factor: float
    max_positions: int
    original_max_positions: int
    low_freq_factor: float
    high_freq_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float
    factors: tuple[float, ...] = ()

    @classmethod
    def read(cls, fields: Fields, *, head_dim: int, max_positions: int) -> RopeConfig:
        """Read ``rope_scaling`` and ``rope_theta``, or without ``rope_scaling`` ``rope_parameters`` (transformers 5).

        Raises ModelError for an unknown kind of rope, and ConfigError for a wrong value.
        """
        # The order is that of transformers, so a rope_scaling that somebody adds to a newer file counts.
        key = "rope_scaling" if fields.get("rope_scaling") or not fields.get("rope_parameters") else "rope_parameters"
        raw = fields.get(key) or {}
        if not isinstance(raw, dict):
            raise fields.error(key, "an object", raw)
        raw = {name: fields.get(name) for name in ("rope_theta", "partial_rotary_factor")} | raw
        rope = Fields(raw, f"{fields.where} {key}")
        kind = rope.get("rope_type", "type") or "default"
        if kind not in KINDS:
            raise ModelError(
                f"{rope.where}: the torch engine does not know the rope type {kind!r}; it knows {', '.join(KINDS)}. "
                "For others use --engine vllm."
            )
        least = 4 if kind == "dynamic" else 2
        if head_dim % 2 or head_dim < least:
            raise fields.error("head_dim", f"an even number of at least {least}, as heads are rotated", head_dim)
        theta = rope.positive("rope_theta", default=10000.0)
        if theta == 1 and kind == "yarn":
            raise rope.error("rope_theta", "another number than 1", theta)
        if rope.positive("partial_rotary_factor", default=1.0) != 1:
            raise ModelError(
                f"{rope.where}: partial_rotary_factor asks to rotate a part of each head, which neither transformers "
                "does for this architecture nor the torch engine; expected another model, or --engine vllm"
            )
        original = fields.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
        original = Fields({"original_max_position_embeddings": original}, rope.where).count(
            "original_max_position_embeddings", default=max_positions
        )
        factor = rope.positive(
            "factor", default=None if kind in ("linear", "dynamic", "llama3") else max_positions / original
        )
        low = rope.positive("low_freq_factor", default=None if kind == "llama3" else 1.0)
        high = rope.positive("high_freq_factor", default=None if kind == "llama3" else 4.0)
        if kind == "llama3" and high <= low:
            raise rope.error("high_freq_factor", f"more than the low_freq_factor of {low:g}", high)
        return cls(
            kind=kind,
            size=head_dim,
            theta=theta,
            factor=factor,
            max_positions=max_positions,
            original_max_positions=original,
            low_freq_factor=low,
            high_freq_factor=high,
            beta_fast=rope.positive("beta_fast", default=32.0),
            beta_slow=rope.positive("beta_slow", default=1.0),
            truncate=rope.flag("truncate", default=True),
            attention_factor=_attention_factor(rope, factor) if kind == "yarn" else 1.0,
            factors=_factors(rope, head_dim // 2) if kind == "longrope" else (),
        )


class Rope:
    """A rope, which computes the rotation of a step from its positions."""

    def __init__(self, config: RopeConfig) -> None:
        self.config = config
        self._frequencies: Tensor | None = None

    def rotation(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return the rotation for positions [tokens], computed in fp32 and then rounded to ``dtype``."""
        # Made here and not in the constructor, because only the positions show the device.
        frequencies = self._frequencies
        if frequencies is None or frequencies.device != positions.device:
            frequencies = self._frequencies = _frequencies(self.config).to(positions.device)
        angles = positions.to(torch.float32).unsqueeze(-1) * frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.config.attention_factor != 1.0:
            cos, sin = cos * self.config.attention_factor, sin * self.config.attention_factor
        return Rotation(
            torch.cat((cos, cos), -1).to(dtype).unsqueeze(1), torch.cat((-sin, sin), -1).to(dtype).unsqueeze(1)
        )


def _frequencies(config: RopeConfig) -> Tensor:
    """Return the frequencies [rotated / 2] in radians per position."""
    frequencies = 1.0 / (config.theta ** (torch.arange(0, config.size, 2, dtype=torch.float32) / config.size))
    if config.kind == "linear":
        return frequencies / config.factor
    if config.factors:
        return frequencies / torch.tensor(config.factors)
    if config.kind == "llama3":
        return _llama3(config, frequencies)
    if config.kind == "yarn":
        return _yarn(config, frequencies)
    return frequencies


def _llama3(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Scale like Llama 3.1: divide low frequencies by the factor, keep high ones, and blend those between."""
    turns = config.original_max_positions * frequencies / (2 * math.pi)  # full turns over the trained length
    blend = (turns - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / config.factor + blend * frequencies


def _yarn(config: RopeConfig, frequencies: Tensor) -> Tensor:
    """Scale like YaRN (Peng et al., 2023, §3.2): like Llama 3.1, but blend linearly over the dimensions."""

    def dimension(turns: float) -> float:
        length = math.log(config.original_max_positions / (turns * 2 * math.pi))
        return config.size * length / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.size - 1)
    places = torch.arange(config.size // 2, dtype=torch.float32)
    stretched = ((places - low) / (high - low or 0.001)).clamp(0, 1)
    return stretched * frequencies / config.factor + (1 - stretched) * frequencies


def _factors(rope: Fields, count: int) -> tuple[float, ...]:
    """Return the factors of a longrope that has the same ones for short and long sequences, as from a GGUF file."""
    factors, long = rope.get("short_factor"), rope.get("long_factor")
    if factors != long or rope.number("attention_factor", default=0.0) != 1:
        raise ModelError(
            f"{rope.where}: the torch engine knows longrope only with one list of factors and attention_factor 1; "
            "for others use --engine vllm"
        )
    if (
        not isinstance(factors, list)
        or len(factors) != count
        or not all(isinstance(one, float | int) and 0 < one < 1e30 for one in factors)
    ):
        raise rope.error("short_factor", f"{count} positive numbers", factors)
    return tuple(factors)


def _attention_factor(rope: Fields, factor: float) -> float:
    """Return YaRN's temperature, a factor for the cosines and sines."""

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    mscale, mscale_all = rope.number("mscale", default=0.0), rope.number("mscale_all_dim", default=0.0)
    return temperature(mscale) / temperature(mscale_all) if mscale and mscale_all else temperature(1.0)
