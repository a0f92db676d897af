"""The activations that checkpoints name in their config.json."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

_tanh_gelu: Callable[[Tensor], Tensor] = partial(F.gelu, approximate="tanh")


def _quick_gelu(hidden: Tensor) -> Tensor:
    return hidden * torch.sigmoid(1.702 * hidden)


def _squared_relu(hidden: Tensor) -> Tensor:
    return F.relu(hidden).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": _tanh_gelu,
    "gelu_fast": _tanh_gelu,
    "gelu_pytorch_tanh": _tanh_gelu,
    "quick_gelu": _quick_gelu,
    "relu2": _squared_relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}
