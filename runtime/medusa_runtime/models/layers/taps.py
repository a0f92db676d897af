"""The weights of a short convolution over a sequence, each channel for itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medusa_runtime.kernels.native import MAX_TAPS
from medusa_runtime.models.base import StatefulAttention
from medusa_runtime.models.fields import Fields


class Taps(nn.Module):
    """A causal convolution: [tokens, channels] → [tokens, channels]. ``weight`` has the shape of torch's Conv1d."""

    def __init__(self, index: int, channels: int, taps: int, *, bias: bool) -> None:
        super().__init__()
        self.index = index
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, x: Tensor, attention: StatefulAttention) -> Tensor:
        return attention.convolve(self.index, x, self.weight.squeeze(1), self.bias)


def count_of_taps(fields: Fields, name: str, *, default: int) -> int:
    """Read how many taps convolutions have. Raises ConfigError for fewer than two, or more than a kernel takes."""
    taps = fields.count(name, default=default, most=MAX_TAPS)
    if taps < 2:
        raise fields.error(name, f"2 to {MAX_TAPS}", taps)
    return taps


__all__ = ["Taps", "count_of_taps"]
