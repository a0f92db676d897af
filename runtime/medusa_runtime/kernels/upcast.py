"""Products without a compiled kernel: convert one slice of the weight at a time to fp32, and multiply that.

From a dozen rows on, this beats torch's own 16-bit product on CPUs that have no 16-bit dot products.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

FEW_ROWS = 12
CHUNK_COLS = 512  # a slice stays in the cache between the conversion and the product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [rows, depth] @ weight [cols, depth]^T + bias → [rows, cols] in x's dtype, accumulated in fp32."""
    if x.shape[0] < FEW_ROWS:
        return F.linear(x, weight, bias)
    out = x.new_empty(x.shape[0], weight.shape[0])
    wide = x.float()
    for start in range(0, weight.shape[0], CHUNK_COLS):
        part = slice(start, start + CHUNK_COLS)
        out[:, part] = F.linear(wide, weight[part].float(), None if bias is None else bias[part].float())
    return out
