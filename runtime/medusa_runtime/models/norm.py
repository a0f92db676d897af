"""Root-mean-square norm (Zhang and Sennrich, 2019), computed in fp32."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """[..., size] → [..., size]."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.shape = (size,)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.rms_norm(x, self.shape, self.weight, self.eps)
