"""Projections that use the fastest matrix product on this machine."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from medusa_runtime.kernels import linear, linears
from medusa_runtime.models.layers.lora import AdaptedLayer, add_adapters


class Linear(nn.Linear):
    """A linear layer: [tokens, in] → [tokens, out]. ``adapted`` is set once a LoRA adapter has matrices for it."""

    adapted: AdaptedLayer | None = None
    takes_codes = True  # the weight may stay quantized (load/applier.py)

    def reset_parameters(self) -> None:
        """Do nothing, because a loader brings the values."""

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Project ``input``, and add ``residual`` [tokens, out] if there is one."""
        out = linear(input, self.weight, self.bias, residual)
        if self.adapted is not None and self.adapted.step.groups:
            add_adapters(input, (out,), (self.adapted,))
        return out


def project(x: Tensor, *projections: Linear) -> Sequence[Tensor]:
    """Return each projection of x [tokens, in], computed as one product where there is a kernel for it."""
    weights = [projection.weight for projection in projections]
    outs = linears(x, weights, [projection.bias for projection in projections])
    for projection in projections:
        if projection.adapted is not None:
            if projection.adapted.step.groups:
                add_adapters(x, outs, [one.adapted for one in projections])
            break
    return outs
