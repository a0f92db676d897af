"""Write a checkpoint of a real model's shape with random weights: ``python -m benchmarks.make_checkpoint --help``.

The weights are normally distributed with a standard deviation of 0.02. They are copied from one random block, from a
different offset for each tensor, so that gigabytes are written at the speed of the disk. Norms are ones and biases
zeros, so that logits stay finite. MXFP4 has random values, of the same size.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import struct
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from medusa_runtime.imports.lazy_torch import import_torch

from benchmarks.shapes import SHAPES, Shape, Tensor

EXAMPLE = Path(__file__).parents[1] / "examples" / "pydoc-lm"
DTYPES = {"bf16": ("BF16", "bfloat16", 2), "fp16": ("F16", "float16", 2), "fp32": ("F32", "float32", 4)}
_BLOCK_ELEMENTS = 4_194_301  # a prime number: with one that rows divide, a large matrix has equal rows
_SCALE = 120  # of MXFP4: 2 to the power of -7
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", required=True, choices=sorted(SHAPES), metavar="SHAPE", help=", ".join(sorted(SHAPES))
    )
    parser.add_argument("--out", required=True, type=Path, help="a new or empty folder")
    parser.add_argument("--shard-size", type=size, default=size("2GB"), help="shards above this size, e.g. 500MB (2GB)")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"--out: expected a new or empty folder, {options.out} has files")
    began = time.perf_counter()
    total_bytes = write(SHAPES[options.shape], options.out, options.shard_size, options.dtype, options.seed)
    seconds = time.perf_counter() - began
    print(f"{options.out}: {total_bytes / 1e6:.0f} MB in {seconds:.1f} s, {total_bytes / 1e6 / seconds:.0f} MB/s")
    return 0


def size(text: str) -> int:
    """Parse a size in bytes, such as ``500MB``, ``2GB`` or a plain number."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]B)?", text.strip(), re.IGNORECASE)
    if not found or float(found[1]) <= 0:
        raise argparse.ArgumentTypeError(f"expected a size such as 500MB or 2GB, found {text!r}")
    return int(float(found[1]) * _UNITS.get((found[2] or "").upper(), 1))


def write(shape: Shape, out: Path, shard_size: int, dtype: str, seed: int) -> int:
    """Write the whole checkpoint, and return the bytes of its tensors."""
    out.mkdir(parents=True, exist_ok=True)
    code, name, width = DTYPES[dtype]
    blocks = Blocks(dtype, seed)
    shards = list(split(shape.tensors(), shard_size, width))
    for number, shard in enumerate(shards, 1):
        with (out / shard_name(number, len(shards))).open("wb") as file:
            write_shard(file, shard, code, width, blocks)
    total_bytes = sum(size_of(tensor, width) for shard in shards for tensor in shard)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": total_bytes},
            "weight_map": {t.name: shard_name(n, len(shards)) for n, shard in enumerate(shards, 1) for t in shard},
        }
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (out / "config.json").write_text(json.dumps({**shape.config(), "dtype": name, "torch_dtype": name}, indent=1))
    (out / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0}))
    write_tokenizer(out, shape.vocabulary)
    return total_bytes


def shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def size_of(tensor: Tensor, width: int) -> int:
    """Return the bytes of a tensor in a checkpoint whose floats have ``width`` bytes."""
    return tensor.elements * (1 if tensor.kind in ("blocks", "scales") else width)


def split(tensors: Iterator[Tensor], shard_size: int, width: int) -> Iterator[list[Tensor]]:
    """Distribute the tensors over shards, in order. A tensor larger than ``shard_size`` gets a shard of its own."""
    shard: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if shard and filled + size_of(tensor, width) > shard_size:
            yield shard
            shard, filled = [], 0
        shard.append(tensor)
        filled += size_of(tensor, width)
    yield shard


def write_shard(file: BinaryIO, tensors: list[Tensor], code: str, width: int, blocks: Blocks) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for tensor in tensors:
        start, stop = stop, stop + size_of(tensor, width)
        dtype = "U8" if tensor.kind in ("blocks", "scales") else code
        header[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, stop]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format aligns the data section to 8 bytes
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors:
        for piece in blocks.of(tensor, width):
            file.write(piece)


class Blocks:
    """The bytes of tensors, in pieces of a few megabytes."""

    def __init__(self, dtype: str, seed: int) -> None:
        import_torch()  # a second or two, if plainly
        import torch

        kind = getattr(torch, DTYPES[dtype][1])
        generator = torch.Generator().manual_seed(seed)

        def as_bytes(values: torch.Tensor) -> memoryview:
            return memoryview(bytearray(values.to(kind).view(torch.uint8).numpy())).toreadonly()

        self._kinds = {
            "normal": as_bytes(torch.randn(_BLOCK_ELEMENTS, generator=generator) * 0.02),
            "ones": as_bytes(torch.ones(_BLOCK_ELEMENTS // 64)),
            "zeros": as_bytes(torch.zeros(_BLOCK_ELEMENTS // 64)),
            "blocks": memoryview(bytearray(torch.randint(256, (_BLOCK_ELEMENTS,), generator=generator).byte().numpy())),
            "scales": memoryview(bytes([_SCALE]) * (_BLOCK_ELEMENTS // 64)),
        }

    def of(self, tensor: Tensor, width: int) -> Iterator[memoryview]:
        block = self._kinds[tensor.kind]
        # The offset depends only on the name. So no two layers are equal, and each run writes the same bytes.
        at = zlib.crc32(tensor.name.encode()) % (len(block) // width) * width
        left = size_of(tensor, width)
        while left:
            piece = block[at : at + left]
            yield piece
            left -= len(piece)
            at = 0


def write_tokenizer(out: Path, vocabulary: int) -> None:
    """Write the example model's tokenizer, cut or padded to ``vocabulary`` tokens, so that every id can be decoded."""
    tokenizer = json.loads((EXAMPLE / "tokenizer.json").read_text())
    model = tokenizer["model"]
    known = {token: number for token, number in model["vocab"].items() if number < vocabulary}
    known.update({f"<|unused{number}|>": number for number in range(len(model["vocab"]), vocabulary)})
    pairs = [(pair, pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]]
    model["merges"] = [pair for pair, (left, right) in pairs if {left, right, left + right} <= known.keys()]
    model["vocab"] = known
    (out / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    shutil.copy(EXAMPLE / "tokenizer_config.json", out)


if __name__ == "__main__":
    sys.exit(main())
