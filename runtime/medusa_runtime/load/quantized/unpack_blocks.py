"""Unpacking ggml's blocks, whose structs are in its ``ggml-common.h``.

Each function takes uint8 [blocks, bytes of a block] of the format that it is named after. It returns integers [blocks,
groups, values of a group], with the scale and perhaps the minimum of each group, float32 [blocks, groups]. A value is
its integer times the scale, less the minimum.
"""

from __future__ import annotations

import torch
from torch import Tensor

Unpacked = tuple[Tensor, Tensor, Tensor | None]

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_MXFP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice the floats of E2M1


def q4_0(blocks: Tensor) -> Unpacked:
    return _halves(blocks[:, 2:]).char() - 8, _float(blocks, 0), None


def q4_1(blocks: Tensor) -> Unpacked:
    return _halves(blocks[:, 4:]), _float(blocks, 0), -_float(blocks, 2)


def q5_0(blocks: Tensor) -> Unpacked:
    values = _halves(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return values.char() - 16, _float(blocks, 0), None


def q5_1(blocks: Tensor) -> Unpacked:
    return _halves(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4, _float(blocks, 0), -_float(blocks, 2)


def q8_0(blocks: Tensor) -> Unpacked:
    return blocks[:, None, 2:].view(torch.int8), _float(blocks, 0), None


def q2_k(blocks: Tensor) -> Unpacked:
    scales, values = blocks[:, :16], _fields(blocks[:, 16:80], 2, runs=2)
    return _sixteens(values), _float(blocks, 80) * (scales & 15), _float(blocks, 82) * (scales >> 4)


def q3_k(blocks: Tensor) -> Unpacked:
    values = _fields(blocks[:, 32:96], 2, runs=2) | _fields(blocks[:, :32], 1) << 2
    low, high = _fields(blocks[:, 96:104], 4).flatten(1), _fields(blocks[:, 104:108], 2).flatten(1)
    return _sixteens(values).char() - 4, _float(blocks, 108) * ((low | high << 4).char() - 32), None


def q4_k(blocks: Tensor) -> Unpacked:
    return _fields(blocks[:, 16:], 4, runs=4), *_scales_and_minima(blocks)


def q5_k(blocks: Tensor) -> Unpacked:
    values = _fields(blocks[:, 48:], 4, runs=4) | _fields(blocks[:, 16:48], 1) << 4
    return values, *_scales_and_minima(blocks)


def q6_k(blocks: Tensor) -> Unpacked:
    low = _fields(blocks[:, :128], 4, runs=2).reshape(-1, 8, 32)
    high = _fields(blocks[:, 128:192], 2, runs=2)
    return _sixteens(low | high << 4).char() - 32, _float(blocks, 208) * blocks[:, 192:208].view(torch.int8), None


def iq4_nl(blocks: Tensor) -> Unpacked:
    return torch.tensor(_IQ4)[_halves(blocks[:, 2:]).int()], _float(blocks, 0), None


def iq4_xs(blocks: Tensor) -> Unpacked:
    values = torch.tensor(_IQ4)[_fields(blocks[:, 8:], 4, runs=8).reshape(-1, 8, 32).int()]
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), 2).flatten(1)
    high = torch.stack([blocks[:, 2:4] >> shift & 3 for shift in (0, 2, 4, 6)], 2).flatten(1)
    return values, _float(blocks, 0) * ((low | high << 4).char() - 32), None


def mxfp4(blocks: Tensor) -> Unpacked:
    exponent = blocks[:, :1].float() - 128
    return torch.tensor(_MXFP4)[_halves(blocks[:, 1:]).int()], exponent.exp2(), None


def _float(blocks: Tensor, at: int) -> Tensor:
    """Return the fp16 number at a byte of each block, as float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _fields(octets: Tensor, bits: int, runs: int = 1) -> Tensor:
    """Unpack [blocks, runs * n] to [blocks, runs * 8 / bits, n]: of a run, first the lowest bits of all its bytes."""
    octets = octets.reshape(len(octets), runs, -1)
    mask = (1 << bits) - 1
    return torch.stack([octets >> shift & mask for shift in range(0, 8, bits)], 2).flatten(1, 2)


def _halves(octets: Tensor) -> Tensor:
    """Unpack 16 bytes of each block to [blocks, 1, 32]: their low halves, then the high ones."""
    return torch.cat((octets & 15, octets >> 4), 1).unsqueeze(1)


def _bits(octets: Tensor) -> Tensor:
    """Unpack 4 bytes of each block to [blocks, 1, 32]."""
    return torch.stack([octets >> shift & 1 for shift in range(8)], 2).flatten(1).unsqueeze(1)


def _sixteens(values: Tensor) -> Tensor:
    return values.reshape(-1, 16, 16)


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return those of Q4_K and Q5_K: 6 bits each, and of the last four, two bits are above the first four."""
    scales, minima, both = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((scales & 63, both & 15 | scales >> 2 & 48), 1)
    minima = torch.cat((minima & 63, both >> 4 | minima >> 2 & 48), 1)
    return _float(blocks, 0) * scales, _float(blocks, 2) * minima


__all__ = [
    "iq4_nl", "iq4_xs", "mxfp4", "q2_k", "q3_k", "q4_0", "q4_1", "q4_k", "q5_0", "q5_1", "q5_k", "q6_k", "q8_0",
]  # fmt: skip
