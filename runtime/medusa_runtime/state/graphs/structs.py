"""The driver's structures, with the layout of cuda.h 13.0. The ``_v2`` functions keep them stable."""

from __future__ import annotations

import ctypes
import struct
from ctypes import c_int, c_uint, c_uint64, c_void_p

# CUDA_MEMSET_NODE_PARAMS: dst, pitch, value, element size, width, height.
MEMSET_NODE = struct.Struct("<QQIIQQ")
MEMSET_POINTERS = (0,)
# CUDA_MEMCPY3D: the offsets of addresses and of kinds of memory in its 200 bytes.
MEMCPY_NODE_BYTES = 200
MEMCPY_POINTERS = (48, 136)
MEMCPY_TYPES = (32, 120)
MEMORY_TYPE_DEVICE = 2
MEMORY_TYPE_UNIFIED = 4
EDGE_DATA_BYTES = 8
ATTRIBUTE_BYTES = 64
PROGRAMMATIC = 6  # the launch attribute PROGRAMMATIC_STREAM_SERIALIZATION


class KernelNodeParams(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2. Nodes are added by kernels/source/graphs.c, which has the same structure."""

    _fields_ = (
        ("func", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared_bytes", c_uint),
        ("params", c_void_p),
        ("extra", c_void_p),
        ("kern", c_void_p),
        ("ctx", c_void_p),
    )


class InstantiateParams(ctypes.Structure):
    _fields_ = (("flags", c_uint64), ("upload_stream", c_void_p), ("error_node", c_void_p), ("result", c_int))


class MemLocation(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class MemAllocationProp(ctypes.Structure):
    """CUmemAllocationProp: ``type`` 1 is pinned memory, ``location.type`` 1 a device."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", MemLocation),
        ("win32", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class MemAccessDesc(ctypes.Structure):
    """CUmemAccessDesc: ``flags`` 3 is read and write."""

    _fields_ = (("location", MemLocation), ("flags", c_int))
