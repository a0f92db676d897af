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
from medusa_runtime.state.graphs.blob_format import VERSION, encode
from medusa_runtime.state.graphs.materialization.cubin import parse_cubin
from sanitizers import run_watched

FLIPS = 1200


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


def sealed(data: bytes) -> bytes:
    """Make the digest right again, as a broken writer would: only the reader's checks are left."""
    header = struct.unpack_from("<Q", data, 44)[0] if len(data) > 60 else 0
    body = len(data) - 60 - header
    rest = data[40:44] + struct.pack("<QQ", header, max(body, 0)) + data[60:]
    return data[:8] + hashlib.sha256(rest).digest() + rest


def test_blobs(materialized: dict[str, Any]) -> None:
    whole = Blueprints.load(Path(materialized["path"]).read_bytes())
    data = encode(whole)
    assert sealed(data) == data
    assert not any(survives(Blueprints.load, one) for one in damaged(data, 1)), "a digest tells all"
    start = struct.unpack_from("<Q", data, 44)[0]
    for one in damaged(data[: 60 + start], 2, 60):  # in the header, which has all that refers to something
        text = one[60:] + data[60 + start :]
        rest = struct.pack("<IQQ", VERSION, len(one) - 60, len(data) - 60 - start) + text
        survives(Blueprints.load, data[:8] + hashlib.sha256(rest).digest() + rest)
    for one in damaged(data, 3, 60 + start):
        survives(Blueprints.load, sealed(one))


@pytest.mark.parametrize("name", ["a", "b", "c", "d"])
def test_cubins(cubins: Path, name: str) -> None:
    for one in damaged((cubins / f"toy_{name}.cubin").read_bytes(), ord(name)):
        survives(parse_cubin, one)


def test_whatever_a_table_says_stays_within_its_graph(tmp_path: Path) -> None:
    source = compiled_graphs._LIBRARY.with_name("graphs.c")
    run_watched(Path(__file__).with_name("fuzz_graphs.py"), source, tmp_path)
