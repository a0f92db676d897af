"""Root-mean-square norm (Zhang and Sennrich, 2019), computed in fp32 and rounded in the same places as transformers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medusa_runtime.kernels import rms_norm


class RMSNorm(nn.Module):
    """A root-mean-square norm over the last dimension: [..., size] → [..., size].

    With ``once``, only the result is rounded, and not the factor that the weight is multiplied with.
    ``offset`` is added to the weight.
    """

    def __init__(self, size: int, eps: float, *, once: bool = False, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.once = once
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, once=self.once, offset=self.offset)
