"""CUDA graphs, materialized offline and restored online instead of captured (MEDUSA).

Offline, ``dump_graphs`` reads captured graphs from the driver. ``materialize_graphs`` compares them with a second dump,
made at other addresses, to prove which bytes are pointers, and adds kernel images, contents and reference outputs.
Online, ``place`` maps memory by name, and ``restore_graphs`` builds the graphs, validates them and returns those that
fit.
"""

from __future__ import annotations

from .blueprint import Blueprints, MemoryRange, Piece, RangeKind
from .driver import CudaDriver
from .fingerprint import fingerprint
from .materialization.dump import dump_graphs
from .materialization.images import ImageStore
from .materialization.materialize import Capture, materialize_graphs
from .mismatch import GraphMismatch, Reason
from .placement import Placement, place
from .restoration.kernels import KernelFinder, Trigger
from .restoration.restore import GraphRestorer, RestoredGraph, RestoredGraphs, restore_graphs

__all__ = [
    "Blueprints",
    "Capture",
    "CudaDriver",
    "GraphMismatch",
    "GraphRestorer",
    "ImageStore",
    "KernelFinder",
    "MemoryRange",
    "Piece",
    "Placement",
    "RangeKind",
    "Reason",
    "RestoredGraph",
    "RestoredGraphs",
    "Trigger",
    "dump_graphs",
    "fingerprint",
    "materialize_graphs",
    "place",
    "restore_graphs",
]
