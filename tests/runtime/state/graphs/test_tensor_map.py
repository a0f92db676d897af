"""Addresses in tensor maps are found in any form, proved by two captures, and relocated by the driver."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.state.graphs import Blueprints, MemoryRange, RangeKind
from medusa_runtime.state.graphs.blob_format import decode_blueprints, save_blueprints
from medusa_runtime.state.graphs.blueprint import GraphBlueprint, KernelRecord, Node
from medusa_runtime.state.graphs.materialization.relocate import find_relocations
from medusa_runtime.state.graphs.tensor_map import MAP_BYTES, TensorMaps

OTHER_BASE = 0x580000000000
SWAPPED = bytes(range(16, 144))  # a map's other fields


def split(data: bytes, address: int, alignment: int = 16) -> bytes | None:
    """A form of its own: the address is shifted, its halves are apart, and one of them is inverted."""
    if address % alignment or not address or len(data) != MAP_BYTES:
        return None
    low, high = address >> 4 & 0xFFFFFFFF, address >> 36
    made = bytearray(data)
    made[20:24] = (low ^ 0xFFFFFFFF).to_bytes(4, "little")
    made[40:42] = high.to_bytes(2, "little")
    return bytes(made)


@pytest.mark.parametrize("alignment", [16, 32, 128])
def test_addresses_are_read_from_what_the_driver_writes(alignment: int) -> None:
    def encode(data: bytes, address: int) -> bytes | None:
        return split(data, address, alignment)

    for first, second in [(0x600000000200, 0x500012345680), (0x7FFFFFFFFF80, 1 << 40), (1 << 41, 3 << 40)]:
        one, two = encode(SWAPPED, first), encode(SWAPPED, second)
        assert one is not None
        assert two is not None
        assert TensorMaps(encode).addresses(one, two) == (first, second)
        assert TensorMaps(encode).addresses(one, two[:-1] + b"x") is None, "they differ in more than an address"


def test_a_first_map_with_a_larger_alignment_hides_no_bit_of_others() -> None:
    """Interleaved maps are aligned to 32 bytes, others to 16."""

    def encode(data: bytes, address: int) -> bytes | None:
        return split(data, address, 32 if data[0] == 32 else 16)

    maps = TensorMaps(encode)
    for alignment, first, second in [(32, 0x600000000200, 0x500012345680), (16, 0x600000000210, 0x500012345690)]:
        one, two = (encode(bytes([alignment]) + SWAPPED[1:], address) for address in (first, second))
        assert one is not None
        assert two is not None
        assert maps.addresses(one, two) == (first, second)


def test_what_the_driver_refuses_is_no_map() -> None:
    assert TensorMaps(lambda data, address: None).addresses(SWAPPED, SWAPPED) is None


def test_the_driver_is_asked_for_the_format_once() -> None:
    """A model's graphs have thousands of words that differ and are no maps. NVIDIA's driver takes any bytes for one."""
    asked = 0

    def count(data: bytes, address: int) -> bytes | None:
        nonlocal asked
        asked += 1
        return split(data, address)

    maps = TensorMaps(count)
    for number in range(1000):
        one, two = SWAPPED + number.to_bytes(8, "little"), number.to_bytes(8, "little") + SWAPPED
        assert maps.addresses(one[:MAP_BYTES], two[:MAP_BYTES]) is None
    assert asked < 100


RANGES = (MemoryRange("weights", RangeKind.NAMED, 0x600000000000, 0x10000),)
ELSEWHERE = (RANGES[0]._replace(address=0x500000400000),)


def dump(memory_range: MemoryRange, offset: int, *, before: int = 0, behind: bytes = b"") -> Blueprints:
    """A parameter of ``before`` words, a map, and more."""
    data = split(SWAPPED, memory_range.address + offset)
    assert data is not None
    blob = bytes(8 * before) + data + behind
    kernel = KernelRecord("k", "", ((0, len(blob)),), ())
    node = Node(0, 0, 0, (1, 1, 1), (1, 1, 1), 0, 0, len(blob))
    return Blueprints(ranges=(memory_range,), kernels=(kernel,), graphs=(GraphBlueprint("g", (node,), (), blob),))


@pytest.mark.parametrize("before", [0, 3])
def test_a_map_anywhere_in_a_structure_is_relocated(before: int) -> None:
    """Like the arguments of a CUTLASS kernel, with pointers before and behind it."""
    pointers = [(memory_range.address + 64).to_bytes(8, "little") for memory_range in (RANGES[0], ELSEWHERE[0])]
    one, two = (
        dump(memory_range, 0x400, before=before, behind=pointer)
        for memory_range, pointer in zip((RANGES[0], ELSEWHERE[0]), pointers, strict=True)
    )
    proof = find_relocations(one, two, split)
    (graph,) = proof.blueprints.graphs
    found = [(r.position, r.offset, r.map) for r in graph.relocations]
    assert found == [(8 * before, 0x400, True), (8 * before + MAP_BYTES, 64, False)]
    assert graph.pinned == ()
    assert proof.words["map"] == 1


def test_a_map_that_moved_otherwise_is_not() -> None:
    proof = find_relocations(dump(RANGES[0], 0x400), dump(ELSEWHERE[0], 0x410), split)
    (graph,) = proof.blueprints.graphs
    assert graph.relocations == ()
    assert graph.pinned == (0,)
    assert proof.opaque == {"k": 1}


def test_a_map_into_memory_that_did_not_move_pins_it() -> None:
    """Its bytes are those of a constant, and right only where its range is the same."""
    (graph,) = find_relocations(dump(RANGES[0], 0x400), dump(RANGES[0], 0x400), split).blueprints.graphs
    assert graph.pinned == (0,)


def test_maps_from_process_to_process(toy: Any, tmp_path: Path) -> None:
    second, bundle = tmp_path / "second", tmp_path / "bundle"
    options = {"maps": True, "order": 1}
    toy("dump", {"dump": str(second), **options}, base=0x500000000000, FAKE_CUDA_HANDLES="0x540000000000")
    made = toy("materialize", {"out": str(bundle), "second": str(second), "maps": True})
    assert made["refused"] == {}
    assert made["pinned"] == []
    blueprints = decode_blueprints(bundle.read_bytes())
    assert sum(r.map for r in blueprints.graph("decode-1").relocations) == 2, "one a layer"
    for mode in ("recorded", "relocate"):
        restored = toy("restore", {"bundle": str(bundle), "mode": mode, "validate": "all"}, base=OTHER_BASE)
        assert restored["answers"] == made["answers"], mode
    flat = replace(
        blueprints,
        graphs=tuple(
            replace(graph, relocations=tuple(r for r in graph.relocations if not r.map)) for graph in blueprints.graphs
        ),
    )
    save_blueprints(flat, bundle)
    restored = toy("restore", {"bundle": str(bundle), "mode": "relocate", "validate": "all"}, base=OTHER_BASE)
    assert restored.get("restored") == [] or "broke the context" in restored["lost"], "the maps are read indeed"
