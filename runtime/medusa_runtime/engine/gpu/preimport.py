"""The imports of an engine on a GPU, for a process that is saved as a snapshot. None of them touches CUDA.

An instance has no use for this: its engine process imports while it makes the GPU's context (``zygote.py``).
"""

from __future__ import annotations

import importlib
from contextlib import suppress

_MODULES = (
    "engine.gpu.footprint",
    "engine.gpu.graph_pool",
    "engine.gpu.graph_state",
    "engine.gpu.runner",
    "load.upload.cuda_link",
    "load.upload.device_load",
    "load.upload.staging",
    "state.graphs.restoration.quarantine",
)


def preimport() -> None:
    for name in _MODULES:
        importlib.import_module(f"medusa_runtime.{name}")
    with suppress(ImportError):
        importlib.import_module("medusa_runtime.kernels.paged_triton")
        # triton names what it compiles by a hash of its library of 400 MB, and keeps that hash.
        with suppress(AttributeError):
            importlib.import_module("triton.runtime.cache").triton_key()
