"""The block formats of ggml: so many neighbouring values of a row are stored in so many bytes, with their scales.

Source: ggml's ``ggml-common.h``, which defines each block as a struct.
"""

from __future__ import annotations

from typing import NamedTuple

GGUF_SUFFIX = ".gguf"


class Block(NamedTuple):
    """A block holds ``values`` neighbours of a row in ``size_bytes`` bytes."""

    values: int
    size_bytes: int


BLOCKS = {
    "Q4_0": Block(32, 18),
    "Q4_1": Block(32, 20),
    "Q5_0": Block(32, 22),
    "Q5_1": Block(32, 24),
    "Q8_0": Block(32, 34),
    "Q2_K": Block(256, 84),
    "Q3_K": Block(256, 110),
    "Q4_K": Block(256, 144),
    "Q5_K": Block(256, 176),
    "Q6_K": Block(256, 210),
    "IQ4_NL": Block(32, 18),
    "IQ4_XS": Block(256, 136),
    "MXFP4": Block(32, 17),
}
