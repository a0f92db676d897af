"""The alignment that a tensor needs so that a product with it has the same bits as after eager loading.

MKL and OpenBLAS, which torch uses for the product of a matrix and a vector, begin with the elements in front of the
first aligned vector register. So the order of the sums, and the last bits, depend on the matrix's address. Products of
two matrices and convolutions copy their operands first and do not depend on it. Eager loading copies into memory that
is aligned for every product. Which alignment matters differs from CPU to CPU, so it is measured.

One case is left out. A convolution of one picture whose whole output is one pixel is such a product, too, and so is
code that uses a kernel as a matrix (spectral_norm). Kernels other than 1x1 still stay where they are, since moving all
kernels of an unaligned file would copy most of a network.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

ALLOCATED_BYTES = 64  # the alignment of torch's allocator
_SIZES = ((5, 1000), (33, 256), (100, 129))  # rows and columns of the matrices that are measured
_STEPS = (8, 16, 32)


def must_move(tensor: Tensor) -> bool:
    """Return whether a product with ``tensor``, a view of a file, could have other bits than one with a copy of it.

    Only products of float32 and float64 can differ.
    """
    return must_move_from(tensor.data_ptr(), tensor.dtype, tensor.shape)


def must_move_from(address: int, dtype: torch.dtype, shape: Sequence[int]) -> bool:
    """Return the same of a tensor of this dtype and shape that would lie at ``address``."""
    if dtype not in (torch.float32, torch.float64) or address % ALLOCATED_BYTES == 0:
        return False
    is_kernel = len(shape) > 3 and math.prod(shape[2:]) > 1
    return not is_kernel and address % needed_bytes() != 0


@functools.cache
def needed_bytes() -> int:
    """Return the smallest alignment, in bytes, with which the address makes no difference on this CPU."""
    offsets = range(0, ALLOCATED_BYTES, _STEPS[0])
    found = [[_product(rows, columns, offset) for offset in offsets] for rows, columns in _SIZES]
    for step in _STEPS:
        aligned = [number for number, offset in enumerate(offsets) if offset % step == 0]
        if all(torch.equal(row[number], row[0]) for row in found for number in aligned):
            return step
    return ALLOCATED_BYTES


def _product(rows: int, columns: int, offset_bytes: int) -> Tensor:
    """Return the product of a fixed matrix and vector, with the matrix ``offset_bytes`` behind an aligned address."""
    values = torch.arange(rows * columns, dtype=torch.float32).mul_(0.7123).frac_()
    memory = torch.empty(values.nbytes + 2 * ALLOCATED_BYTES, dtype=torch.uint8)
    start = -memory.data_ptr() % ALLOCATED_BYTES + offset_bytes
    matrix = memory[start : start + values.nbytes].view(torch.float32).view(rows, columns)
    matrix.copy_(values.view(rows, columns))
    return matrix @ torch.arange(columns, dtype=torch.float32).mul_(0.3141).frac_()
