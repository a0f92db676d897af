"""Imports for the engines on a GPU. They use no CUDA, so they can be made before there is a context."""

from __future__ import annotations

import importlib
import logging
from contextlib import suppress

logger = logging.getLogger(__name__)

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
    """Import what the torch engine needs on a GPU, in a process that is saved as a snapshot.

    An instance does not call this: its engine process imports while it makes the context (``zygote.py``).
    """
    for name in _MODULES:
        importlib.import_module(f"medusa_runtime.{name}")
    with suppress(ImportError):
        importlib.import_module("medusa_runtime.kernels.paged_triton")
        read_triton_key()


def read_triton_key() -> None:
    """Let Triton read its own files, 400 MB, for a hash that is part of the names of kernels in its cache.

    It takes a third of a second, once in a process or in one that it was forked from, and otherwise before the first
    kernel.
    """
    try:
        from triton.runtime.cache import triton_key

        triton_key()  # which keeps what it returns
    except Exception as error:  # noqa: BLE001 - without Triton, or with another version of it, its first kernel does so
        logger.debug("Triton's files are read with its first kernel: %s", error)
