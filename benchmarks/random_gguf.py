"""Write a GGUF file of a Llama's shape with random weights: ``python -m benchmarks.random_gguf --help``.

Matrices have the types of a Q4_K_M file: Q4_K, and Q6_K for the embeddings and, in every second layer, for the values
and the last projection. Their integers are copied from one random block. The tokenizer is that of another GGUF file,
such as ``models/ggml-vocab-llama-bpe.gguf`` in llama.cpp's source, because a real vocabulary is a part of a start.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.shapes import SHAPES, Shape

# Where the blocks of a type have their scales (float16), and numbers with which values are about 0.02.
_SCALES = {"Q4_K": {0: 0.0003, 2: 0.002}, "Q6_K": {208: 0.00002}}
_POOL_BYTES = 67_108_859  # a prime number: with one that blocks divide, tensors would have equal rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes = sorted(name for name, shape in SHAPES.items() if shape.family == "llama" and fits(shape))
    parser.add_argument("--shape", required=True, choices=shapes)
    parser.add_argument("--vocabulary", required=True, type=Path, metavar="FILE", help="a GGUF file with a tokenizer")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="the .gguf file to write")
    options = parser.parse_args(arguments)
    write(SHAPES[options.shape], options.vocabulary, options.out)
    print(f"{options.out}: {options.out.stat().st_size / 1e6:.0f} MB")
    return 0


def fits(shape: Shape) -> bool:
    """Return whether rows consist of whole blocks."""
    return shape.hidden % 256 == 0 and shape.intermediate % 256 == 0


def write(shape: Shape, vocabulary: Path, out: Path) -> None:
    import gguf

    tokenizer = {
        key: field.contents()
        for key, field in gguf.GGUFReader(vocabulary).fields.items()
        if key.startswith("tokenizer.")
    }
    writer = gguf.GGUFWriter(out, "llama")
    for key, value in {**_metadata(shape), **tokenizer}.items():
        _add(writer, key, value)
    make = _Blocks()
    for name, size, kind in _tensors(shape, len(tokenizer["tokenizer.ggml.tokens"])):
        if kind == "F32":
            writer.add_tensor(name, make.ones(size[0]))
        else:
            writer.add_tensor(name, make.blocks(size, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(shape: Shape) -> dict[str, Any]:
    return {
        "llama.block_count": shape.layers,
        "llama.context_length": shape.context,
        "llama.embedding_length": shape.hidden,
        "llama.feed_forward_length": shape.intermediate,
        "llama.attention.head_count": shape.heads,
        "llama.attention.head_count_kv": shape.kv_heads,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": shape.head_dim or shape.hidden // shape.heads,
        "llama.rope.freq_base": 500000.0,
    }


def _tensors(shape: Shape, tokens: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Yield name, shape and type of each tensor. The output's weights are those of the embeddings."""
    size = shape.head_dim or shape.hidden // shape.heads
    yield "token_embd.weight", (tokens, shape.hidden), "Q6_K"
    yield "output_norm.weight", (shape.hidden,), "F32"
    for layer in range(shape.layers):
        better = "Q6_K" if layer % 2 else "Q4_K"
        for name, rows, columns, kind in (
            ("attn_q", shape.heads * size, shape.hidden, "Q4_K"),
            ("attn_k", shape.kv_heads * size, shape.hidden, "Q4_K"),
            ("attn_v", shape.kv_heads * size, shape.hidden, better),
            ("attn_output", shape.hidden, shape.heads * size, "Q4_K"),
            ("ffn_gate", shape.intermediate, shape.hidden, "Q4_K"),
            ("ffn_up", shape.intermediate, shape.hidden, "Q4_K"),
            ("ffn_down", shape.hidden, shape.intermediate, better),
        ):
            yield f"blk.{layer}.{name}.weight", (rows, columns), kind
        yield f"blk.{layer}.attn_norm.weight", (shape.hidden,), "F32"
        yield f"blk.{layer}.ffn_norm.weight", (shape.hidden,), "F32"


class _Blocks:
    """Makes random weights in blocks."""

    def __init__(self) -> None:
        import numpy

        self._numpy = numpy
        self._pool = numpy.random.default_rng(0).integers(0, 256, _POOL_BYTES, numpy.uint8)
        self._at = 0

    def ones(self, count: int) -> Any:
        return self._numpy.ones(count, self._numpy.float32)

    def blocks(self, shape: tuple[int, ...], kind: str) -> Any:
        import gguf

        values, size_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        row_bytes = shape[1] // values * size_bytes
        found = self._numpy.empty(shape[0] * row_bytes, self._numpy.uint8)
        filled = 0
        while filled < len(found):
            count = min(len(found) - filled, _POOL_BYTES - self._at)
            found[filled : filled + count] = self._pool[self._at : self._at + count]
            filled, self._at = filled + count, (self._at + count) % _POOL_BYTES
        blocks = found.reshape(-1, size_bytes)
        for place, scale in _SCALES[kind].items():
            blocks[:, place : place + 2] = self._numpy.frombuffer(self._numpy.float16(scale).tobytes(), "uint8")
        return found.reshape(shape[0], row_bytes)


def _add(writer: Any, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add.get(type(value), writer.add_array)(key, value)


if __name__ == "__main__":
    sys.exit(main())
