"""A projection that multiplies the fastest way there is on this machine."""

from __future__ import annotations

from torch import Tensor, nn

from medusa_runtime.kernels import linear


class Linear(nn.Linear):
    """[tokens, in] → [tokens, out]."""

    def reset_parameters(self) -> None:
        """Nothing: a loader brings the values."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
