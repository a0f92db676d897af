"""The checkpoint that a fetch benchmark serves. It has valid headers, varied bytes, and a known checksum."""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

BUCKET = "bucket"
KEY = "model/model.safetensors"
_PIECE_BYTES = 1 << 20
_ROWS_BYTES = 4096 * 2  # one row of a bf16 matrix, 4096 wide
_LARGEST_TENSOR_BYTES = 64 << 20


@dataclass(frozen=True)
class ServedCheckpoint:
    """A safetensors file at ``<root>/<BUCKET>/<KEY>``. ``crc`` is the CRC-32 of its bytes from ``data_start`` on."""

    root: Path
    size_bytes: int
    data_start: int
    crc: int


def make_checkpoint(root: Path, size_bytes: int) -> ServedCheckpoint:
    """Write a checkpoint of about ``size_bytes`` (rounded up to whole rows) below ``root``, into the page cache."""
    path = root / BUCKET / KEY
    path.parent.mkdir(parents=True)
    (path.parent / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "hidden_size": 4096}))
    header, data_bytes = _header(max(size_bytes, _ROWS_BYTES))
    noise = os.urandom(_PIECE_BYTES)
    crc = 0
    with path.open("wb") as file:
        file.write(header)
        for start in range(0, data_bytes, _PIECE_BYTES):
            # Each piece begins with its own offset, so that a piece in the wrong place changes the checksum.
            piece = (start.to_bytes(8, "little") + noise[8:])[: data_bytes - start]
            crc = zlib.crc32(piece, crc)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())  # otherwise write-back during a sample would be counted as a client's CPU time
    return ServedCheckpoint(root, len(header) + data_bytes, len(header), crc)


def _header(data_bytes: int) -> tuple[bytes, int]:
    """Return a safetensors header with its length field, and the number of data bytes.

    The tensors have shapes as in a decoder: a large embedding, then layers.
    """
    rows = -(-data_bytes // _ROWS_BYTES)
    tensors: dict[str, object] = {}
    largest_bytes = min(_LARGEST_TENSOR_BYTES, data_bytes // 8)
    start, number = 0, 0
    while rows:
        share = 1.0 if number == 0 else (0.5, 0.125, 0.25)[number % 3]
        count = min(rows, max(1, int(largest_bytes * share) // _ROWS_BYTES))
        name = "model.embed_tokens.weight" if number == 0 else _layer_tensor(number - 1)
        stop = start + count * _ROWS_BYTES
        tensors[name] = {"dtype": "BF16", "shape": [count, _ROWS_BYTES // 2], "data_offsets": [start, stop]}
        start, rows, number = stop, rows - count, number + 1
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return len(text).to_bytes(8, "little") + text, start


def _layer_tensor(number: int) -> str:
    part = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")[number % 5]
    return f"model.layers.{number // 5}.{part}.weight"
