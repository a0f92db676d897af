"""A fingerprint of weights: a digest of samples of each tensor. It says whether weights are those of another time.

A checkpoint that was trained further has other values nearly everywhere, under the same names and shapes. So 4 KiB of
each tensor tell them apart, wherever the weights came from, and to read these takes a few milliseconds.
"""

from __future__ import annotations

import hashlib

from ..region.reader import Region

_PIECES, _PIECE_BYTES = 16, 256  # of each tensor, at equal distances


def fingerprint(region: Region) -> str:
    """Return the fingerprint of a region's weights, in 64 hexadecimal digits. Waits for them, and raises like ``wait``.

    It protects from mistakes, not from an attacker: bytes between the samples are not looked at.
    """
    index = region.wait_index()
    digest = hashlib.sha256()
    for name, entry in sorted(index.tensors.items()):
        size_bytes = entry.stop - entry.start
        digest.update(f"{name}\n{entry.dtype}\n{size_bytes}\n".encode())
        if not size_bytes:
            continue
        region.wait(entry.start, entry.stop, entry.shard)
        shard = region.shard(entry.shard)
        last = max(size_bytes - _PIECE_BYTES, 0)
        for piece in range(_PIECES if last else 1):
            start = entry.start + last * piece // (_PIECES - 1)
            digest.update(shard[start : min(start + _PIECE_BYTES, entry.stop)])
    return digest.hexdigest()


__all__ = ["fingerprint"]
