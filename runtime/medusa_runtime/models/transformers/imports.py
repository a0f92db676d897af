"""Importing transformers, without what only training, downloads and other modalities need."""

from __future__ import annotations

import importlib
import os


def import_transformers() -> None:
    """Import the parts of transformers that every model needs. Idempotent; raises ImportError."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything comes from the checkpoint
    importlib.import_module("transformers.modeling_utils")


__all__ = ["import_transformers"]
