"""CUDA graphs, materialized offline and restored online instead of captured (MEDUSA).

Offline: ``dump_graphs`` reads captured graphs through the driver; ``materialize_graphs`` proves with a second dump,
made at other addresses, which bytes are pointers, and adds kernel images, contents and reference outputs.
Online: ``place`` maps memory by name, ``restore_graphs`` builds the graphs, validates them and gives those that fit.
"""

from __future__ import annotations

from .blueprint import Blueprints, DeviceRegion, Piece, RegionKind
from .driver import CudaDriver
from .dump import dump_graphs
from .fingerprint import fingerprint
from .images import ImageStore
from .kernels import Trigger
from .materialize import Capture, materialize_graphs
from .mismatch import MismatchError, Reason
from .placement import Placement, place, replayed
from .restore import RestoredGraph, RestoredGraphs, restore_graphs
from .trace import AllocationTrace

__all__ = [
    "AllocationTrace",
    "Blueprints",
    "Capture",
    "CudaDriver",
    "DeviceRegion",
    "ImageStore",
    "MismatchError",
    "Piece",
    "Placement",
    "Reason",
    "RegionKind",
    "RestoredGraph",
    "RestoredGraphs",
    "Trigger",
    "dump_graphs",
    "fingerprint",
    "materialize_graphs",
    "place",
    "replayed",
    "restore_graphs",
]
