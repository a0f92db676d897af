"""Constructing a module of transformers without initial values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...imports.lean_transformers import without_scripts
from .config import refused

_OF_BAD_SIZES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def construct(kind: Any, own: Any, dtype: torch.dtype) -> Any:
    """Construct a module of class ``kind`` from its configuration ``own``, in evaluation mode.

    Raises ConfigError for one with which the class fails, such as sizes below zero.
    """
    from transformers.modeling_utils import PreTrainedModel

    initialize = PreTrainedModel.init_weights
    with default_dtype(dtype), without_scripts():
        # Weights replace initial values, and computing these would take longer than all the rest.
        PreTrainedModel.init_weights = lambda _: None
        try:
            module = kind(own).eval()
        except _OF_BAD_SIZES as error:
            raise refused(kind.__name__, error) from error
        finally:
            PreTrainedModel.init_weights = initialize
        module.tie_weights()
    return module


def own_attention(kind: Any) -> str:
    """Return the name of transformers' attention for a class that does not run with the engine's."""
    return "sdpa" if kind._supports_sdpa else "eager"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Give modules that are constructed in this context parameters of ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


__all__ = ["construct", "default_dtype", "own_attention"]
