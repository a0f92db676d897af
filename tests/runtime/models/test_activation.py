"""Activations against those that transformers has under the same names."""

from __future__ import annotations

import os

import pytest
import torch
from medusa_runtime.models.layers.activation import ACTIVATIONS

os.environ.setdefault("HF_HUB_OFFLINE", "1")
activations = pytest.importorskip("transformers.activations")


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_it_computes_what_transformers_computes(name: str) -> None:
    numbers = torch.linspace(-6, 6, 101)
    found = ACTIVATIONS[name](numbers)
    assert found.std() > 0.1
    torch.testing.assert_close(found, activations.ACT2FN[name](numbers), rtol=1e-5, atol=1e-6)
