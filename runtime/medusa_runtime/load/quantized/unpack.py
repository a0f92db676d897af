"""Unpacking small numbers from 32-bit words or bytes. Words are little-endian, the first number in the lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # for each nibble of a word, which of eight neighbours it holds


def across(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [rows, words] to uint8 [rows, words * 32 / bits]: a word holds neighbours of a row."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack([_field(octets, bits, at) for at in range(8 // bits)], -1).flatten(1)


def e2m1(octets: Tensor, bits: int) -> Tensor:
    """Unpack uint8 [rows, bytes] to float32 [rows, bytes * 2]: floats of 4 bits (Open Compute's E2M1)."""
    sizes = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    return torch.cat((sizes, -sizes))[across(octets, bits).int()]


def down(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [words, columns] to uint8 [words * 32 / bits, columns]: a word holds neighbours of a column."""
    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    out = torch.empty(words.shape[0], 32 // bits, words.shape[1], dtype=torch.uint8)
    for at in range(32 // bits):
        octet, shift = divmod(at * bits, 8)
        out[:, at] = _field(octets[..., octet], bits, shift // bits)
    return out.flatten(0, 1)


def interleaved(words: Tensor, bits: int) -> Tensor:
    """Unpack int32 [rows, words] to uint8 [rows, words * 8], from AWQ's order: first even nibbles, then odd ones."""
    assert bits == 4
    octets = words.contiguous().view(torch.uint8).view(*words.shape, 4)
    out = torch.empty(*words.shape, 8, dtype=torch.uint8)
    for at, place in enumerate(_AWQ_ORDER):
        out[..., place] = _field(octets[..., at // 2], 4, at % 2)
    return out.flatten(1)


def _field(octets: Tensor, bits: int, at: int) -> Tensor:
    """Return the integer in bits [at * bits, (at + 1) * bits) of each byte."""
    if bits == 8:
        return octets
    return (octets >> (at * bits)) & ((1 << bits) - 1)


__all__ = ["across", "down", "e2m1", "interleaved"]
