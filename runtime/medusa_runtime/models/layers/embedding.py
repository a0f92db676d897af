"""A table of vectors, from which only the rows of a step's tokens are read."""

from __future__ import annotations

from torch import Tensor, nn

from medusa_runtime.kernels import embedding


class Embedding(nn.Embedding):
    """A table of vectors: integers [...] → [..., size]. Of a quantized table, each step dequantizes only its rows."""

    takes_codes = True  # the weight may stay quantized (load/applier.py)

    def reset_parameters(self) -> None:
        """Do nothing, because a loader brings the values."""

    def forward(self, input: Tensor) -> Tensor:
        return embedding(input, self.weight)
