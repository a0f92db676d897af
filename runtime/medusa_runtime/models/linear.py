"""Projections that use the fastest product on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from medusa_runtime.kernels import linear, linears


class Linear(nn.Linear):
    """A linear layer: [tokens, in] → [tokens, out]."""

    def reset_parameters(self) -> None:
        """Do nothing: a loader brings the values."""

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """The projection of ``input``, plus ``residual`` [tokens, out] if there is one."""
        return linear(input, self.weight, self.bias, residual)


def project(x: Tensor, *projections: Linear) -> Sequence[Tensor]:
    """x [tokens, in] through each projection, as one product where there is a kernel for that."""
    weights = [projection.weight for projection in projections]
    return linears(x, weights, [projection.bias for projection in projections])
