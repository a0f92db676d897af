"""The weights of a short convolution over a sequence, each channel for itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medusa_runtime.models.base import StatefulAttention


class Taps(nn.Module):
    """A causal convolution: [tokens, channels] → [tokens, channels]. ``weight`` has the shape of torch's Conv1d."""

    def __init__(self, index: int, channels: int, taps: int, *, bias: bool) -> None:
        super().__init__()
        self.index = index
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def forward(self, x: Tensor, attention: StatefulAttention) -> Tensor:
        return attention.convolve(self.index, x, self.weight.squeeze(1), self.bias)


__all__ = ["Taps"]
