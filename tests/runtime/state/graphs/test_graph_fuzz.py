"""Damaged blobs and cubins: thousands of flipped, cut and doubled bytes always give a StateError.

The compiled code that checks and builds graphs is watched by AddressSanitizer and UBSan meanwhile.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.errors import StateError
from medusa_runtime.state.graphs import Blueprints
from medusa_runtime.state.graphs import compiled as compiled_graphs
from medusa_runtime.state.graphs.blob_format import VERSION, decode_blueprints, encode_blueprints
from medusa_runtime.state.graphs.materialization.cubin import parse_cubin
from sanitizers import run_watched

FLIPS = 1200
HEADER_AT = 68


def damaged(data: bytes, seed: int, start: int = 0) -> Iterator[bytes]:
    numbers = random.Random(seed)
    for _ in range(FLIPS):
        made = bytearray(data)
        how = numbers.randrange(4)
        at = numbers.randrange(start, len(made))
        if how == 0:
            made[at] ^= 1 << numbers.randrange(8)
        elif how == 1:
            for _ in range(numbers.randrange(1, 16)):
                made[numbers.randrange(start, len(made))] = numbers.choice((0, 1, 0x7F, 0x80, 0xFF))
        elif how == 2:
            del made[at : at + numbers.randrange(1, 64)]
        else:
            made[at:at] = made[at : at + numbers.randrange(1, 64)]
        if made != data:
            yield bytes(made)


def survives(parse: Callable[[bytes], Any], data: bytes) -> bool:
    try:
        parse(data)
    except StateError:
        return False
    return True


def sealed(data: bytes, image_bytes: int) -> bytes:
    """Make the digest right again, as a broken writer would: only the reader's checks are left."""
    header = struct.unpack_from("<Q", data, 44)[0] if len(data) > HEADER_AT else 0
    end = max(len(data) - image_bytes, HEADER_AT)
    body = max(end - HEADER_AT - header, 0)
    rest = data[40:44] + struct.pack("<QQQ", header, body, max(len(data) - end, 0)) + data[HEADER_AT:end]
    return data[:8] + hashlib.sha256(rest).digest() + rest + data[end:]


def read(data: bytes) -> tuple[Blueprints, dict[str, bytes]]:
    """Read all of a file, and the images, too."""
    blueprints = decode_blueprints(data)
    return blueprints, {digest: bytes(code) for digest, code in blueprints.images.items()}


def test_blobs(materialized: dict[str, Any]) -> None:
    whole = decode_blueprints(Path(materialized["path"]).read_bytes())
    data = encode_blueprints(whole)
    header, body, images = struct.unpack_from("<QQQ", data, 44)
    body_at, end = HEADER_AT + header, HEADER_AT + header + body
    assert sealed(data, images) == data
    assert not any(survives(read, one) for one in damaged(data, 1)), "digests tell all"
    assert not any(survives(read, one) for one in damaged(data, 4, end)), "those of the images, too"
    for one in damaged(data[:body_at], 2, HEADER_AT):  # in the header, which has all that refers to something
        rest = struct.pack("<IQQQ", VERSION, len(one) - HEADER_AT, body, images) + one[HEADER_AT:] + data[body_at:end]
        survives(read, data[:8] + hashlib.sha256(rest).digest() + rest + data[end:])
    for one in damaged(data, 3, body_at):
        survives(read, sealed(one, images))


@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_cubins(cubins: Path, name: str) -> None:
    for one in damaged((cubins / f"toy_{name}.cubin").read_bytes(), ord(name)):
        survives(parse_cubin, one)


def test_whatever_a_table_says_stays_within_its_graph(tmp_path: Path) -> None:
    source = compiled_graphs.LIBRARY.with_name("source") / "graphs.c"
    run_watched(Path(__file__).with_name("fuzz_graphs.py"), source, tmp_path)
