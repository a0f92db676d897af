"""How two captures classify each word, on graphs made by hand."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from dataclasses import replace

import pytest
from medusa_runtime.state.graphs import Blueprints, GraphMismatch, MemoryRange, RangeKind, Reason
from medusa_runtime.state.graphs.blueprint import Edge, GraphBlueprint, KernelRecord, Node
from medusa_runtime.state.graphs.compiled import used_ranges
from medusa_runtime.state.graphs.fingerprint import check_fingerprint
from medusa_runtime.state.graphs.materialization.relocate import find_relocations
from medusa_runtime.state.graphs.placement import _spans

WEIGHTS, POOL, NEXT = 0x6000_0000_0000, 0x6000_1000_0000, 0x6000_1000_1000
OTHER = {"weights": 0x5000_7000_0000, "pool": 0x5000_0000_0000, "next": 0x5000_3000_0000}
RANGES = (
    MemoryRange("weights", RangeKind.NAMED, WEIGHTS, 0x1000),
    MemoryRange("pool", RangeKind.SLAB, POOL, 0x1000),
    MemoryRange("next", RangeKind.NAMED, NEXT, 0x1000),  # begins where the pool ends
)
ELSEWHERE = tuple(memory_range._replace(address=OTHER[memory_range.name]) for memory_range in RANGES)


def dump(words: list[int], ranges: tuple[MemoryRange, ...] = RANGES) -> Blueprints:
    kernel = KernelRecord("k", "", tuple((8 * n, 8) for n in range(len(words))), ())
    node = Node(0, 0, 0, (1, 1, 1), (1, 1, 1), 0, 0, 8 * len(words))
    graph = GraphBlueprint("g", (node,), (), struct.pack(f"<{len(words)}Q", *words))
    return Blueprints(ranges=ranges, kernels=(kernel,), graphs=(graph,))


def found(first: list[int], second: list[int]) -> list[tuple[int, str, int]]:
    proof = find_relocations(dump(first), dump(second, ELSEWHERE))
    (graph,) = proof.blueprints.graphs
    return [(r.position, RANGES[r.memory_range].name, r.offset) for r in graph.relocations]


def test_pointers_move_with_their_range() -> None:
    first = [WEIGHTS, POOL + 0x80, 7, NEXT + 0xFFF]
    second = [OTHER["weights"], OTHER["pool"] + 0x80, 7, OTHER["next"] + 0xFFF]
    assert found(first, second) == [(0, "weights", 0), (8, "pool", 0x80), (24, "next", 0xFFF)]


def test_what_looks_like_a_pointer_and_stays_is_a_constant() -> None:
    assert found([WEIGHTS + 64, 1], [WEIGHTS + 64, 1]) == []


def test_one_past_the_end() -> None:
    """One capture cannot distinguish it from the start of the next range; two can."""
    assert found([NEXT], [OTHER["pool"] + 0x1000]) == [(0, "pool", 0x1000)]
    assert found([NEXT], [OTHER["next"]]) == [(0, "next", 0)]


def test_what_nobody_named_is_known_by_what_points_to_it() -> None:
    """The other process had a block of the same size before, so numbers and addresses identify nothing."""

    def made(addresses: list[int], words: list[int], size: int = 0x100) -> Blueprints:
        ranges = (MemoryRange(f"workspace {size} {n}", RangeKind.WORKSPACE, at, size) for n, at in enumerate(addresses))
        return dump(words, tuple(ranges))

    a, b, c = 0x7F00_0000_0000, 0x7F00_0100_0000, 0x7F00_0200_0000
    first = made([a, b], [a + 8, b, a])
    graph = find_relocations(first, made([b, c, a], [c + 8, a, c])).blueprints.graphs[0]
    assert [(r.position, r.memory_range, r.offset) for r in graph.relocations] == [(0, 0, 8), (8, 1, 0), (16, 0, 0)]
    assert graph.pinned == ()
    for other in (
        made([b, c], [b + 8, c, c]),  # what was one is two then
        made([b, c], [b + 8, b, b]),  # what were two is one
        made([b, c], [b + 16, c, b]),
        made([b, c], [b + 8, c, b], size=0x200),
    ):
        proof = find_relocations(first, other)
        assert proof.words["opaque"] >= 1
        (graph,) = proof.blueprints.graphs
        assert graph.pinned, "right only where it was captured"
        assert set(graph.pinned) >= {relocation.memory_range for relocation in graph.relocations}


def test_addresses_of_the_processs_own_memory_are_stale() -> None:
    """Both dumps say where the heap was. A number that is no address there, or not aligned, stays unexplained."""
    heaps = ((0x1A0_0000, 0x1C0_0000),), ((0x2A0_0000, 0x2C0_0000),)

    def pinned(one: int, two: int) -> bool:
        first = replace(dump([one, WEIGHTS]), host=heaps[0])
        second = replace(dump([two, OTHER["weights"]], ELSEWHERE), host=heaps[1])
        (graph,) = find_relocations(first, second).blueprints.graphs
        return bool(graph.pinned)

    assert not pinned(0x1A0_0010, 0x2A0_0040)
    assert pinned(0x1A0_0010, 0x2D0_0040)
    assert pinned(0x1A0_0011, 0x2A0_0041), "a number, which only looks like an address"


def test_a_process_knows_its_own_memory() -> None:
    script = """
import ctypes
from medusa_runtime.state.graphs.materialization.host_memory import own_memory
c = ctypes.CDLL(None)
c.malloc.restype = ctypes.c_void_p
on_heap, in_library = c.malloc(24), ctypes.cast(c.memcpy, ctypes.c_void_p).value
on_stack = ctypes.c_void_p.in_dll(c, "environ").value
for address in (on_heap, on_stack, in_library):
    print(any(start <= address < stop for start, stop in own_memory()))
"""
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "PATH": os.environ["PATH"]}
    said = subprocess.check_output([sys.executable, "-c", script], text=True, env=environment, timeout=240)
    assert said.split() == ["True", "True", "False"]


def test_addresses_of_what_was_given_back_are_stale() -> None:
    """Parameters passed by value contain old stack: addresses of the warm-up's memory, which torch still holds."""
    free = MemoryRange("free 256 0", RangeKind.FREE, 0x7000_0000, 0x100)
    first = dump([free.address + 8, WEIGHTS], (*RANGES, free))
    moved = free._replace(name="free 512 0", address=0x9000_0000, size=0x200)
    proof = find_relocations(first, dump([moved.address + 64, OTHER["weights"]], (*ELSEWHERE, moved)))
    assert proof.words == {"stale": 1, "pointer": 1}
    assert proof.blueprints.graphs[0].pinned == ()
    lost = find_relocations(first, dump([0x9000_0000, OTHER["weights"]], ELSEWHERE))
    assert lost.opaque == {"k": 1}
    assert used_ranges(lost.blueprints) == {0, 1, 2}, "what is pinned is placed, and free memory is not"


def test_stale_words_of_the_stack_are_kept() -> None:
    proof = find_relocations(dump([0x7FFC_1234_5678]), dump([0x7FFD_0000_1238], ELSEWHERE))
    assert proof.words == {"stale": 1}
    assert proof.blueprints.graphs[0].pinned == ()


def test_unexplained_words_pin_the_graph() -> None:
    proof = find_relocations(dump([0x1234_0000_0000]), dump([0x1234_0000_0040], ELSEWHERE))
    assert proof.words == {"opaque": 1}
    assert proof.blueprints.graphs[0].pinned == (0, 1, 2)


def test_a_range_that_did_not_move_is_pinned() -> None:
    unmoved = (RANGES[0], *ELSEWHERE[1:])
    proof = find_relocations(dump([WEIGHTS + 8, POOL]), dump([WEIGHTS + 8, OTHER["pool"]], unmoved))
    (graph,) = proof.blueprints.graphs
    assert len(graph.relocations) == 2
    assert graph.pinned == (0,)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (WEIGHTS, OTHER["pool"]),  # another range
        (WEIGHTS + 8, OTHER["weights"] + 16),  # another place in it
        (WEIGHTS, 0x1234_5678_9ABC),  # memory that was not named in the second
        (3, OTHER["pool"]),
        (POOL + 64, 0x7FFD_0000_1238),  # an old address, and one of the host
    ],
)
def test_words_that_the_captures_do_not_agree_on(first: int, second: int) -> None:
    """The first capture's word is right with all memory where it was then, whatever the other one has there."""
    proof = find_relocations(dump([first, NEXT]), dump([second, OTHER["next"]], ELSEWHERE))
    assert proof.words == {"opaque": 1, "pointer": 1}
    assert proof.opaque == {"k": 1}
    (graph,) = proof.blueprints.graphs
    assert [(r.position, r.memory_range) for r in graph.relocations] == [(8, 2)]
    assert graph.pinned == (0, 1, 2)


def test_memory_that_no_word_points_to_is_not_pinned() -> None:
    """Torch's other live blocks: a start could not bring back their contents, nor their addresses."""
    blocks = [MemoryRange(f"workspace 64 {n}", RangeKind.WORKSPACE, 0x7F00_0000_0000 + (n << 32), 64) for n in range(3)]
    moved = [one._replace(address=one.address + 0x1000) for one in blocks]
    words = [0x1234_0000_0000, blocks[0].address, blocks[1].address + 8]
    others = [0x1234_0000_0040, moved[0].address, moved[1].address + 16]
    (graph,) = find_relocations(dump(words, (*RANGES, *blocks)), dump(others, (*ELSEWHERE, *moved))).blueprints.graphs
    assert graph.pinned == (0, 1, 2, 3, 4)


def test_variables_of_images_lie_elsewhere_in_any_process() -> None:
    """So a word that only sometimes leads to one is refused."""
    variable = MemoryRange("image:bias", RangeKind.MODULE, 0x6600_0000_0000, 64)
    other = variable._replace(address=0x5600_0000_0000)
    first, second = (*RANGES, variable), (*ELSEWHERE, other)
    for one, two in ((variable.address, OTHER["pool"]), (POOL, other.address), (variable.address, other.address + 8)):
        (why,) = find_relocations(dump([one], first), dump([two], second)).blueprints.refused.values()
        assert why.startswith("not-deterministic: two captures differ: a parameter of node 0 points to 0x6")


def test_the_pool_at_a_chosen_address_is_one_range_of_any_size() -> None:
    first = MemoryRange("graph pool", RangeKind.SLAB, 0x6800_0000_0000, 4 << 20)
    second = MemoryRange("graph pool", RangeKind.SLAB, 0x5A00_0000_0000, 6 << 20)
    proof = find_relocations(dump([first.address + 640], (first,)), dump([second.address + 640], (second,)))
    (graph,) = proof.blueprints.graphs
    assert [(r.memory_range, r.offset) for r in graph.relocations] == [(0, 640)]
    assert graph.pinned == ()


def test_a_copy_that_leads_elsewhere_in_the_other_capture() -> None:
    """Memsets and copies have only addresses. One in no range is refused, one in a range is right there."""
    node = Node(2, 0, -1, (0, 0, 0), (0, 0, 0), 0, 0, 40)

    def made(address: int, ranges: tuple[MemoryRange, ...]) -> Blueprints:
        blob = struct.pack("<QQIIQQ", address, 0, 0, 4, 1, 1)
        return Blueprints(ranges=ranges, graphs=(GraphBlueprint("g", (node,), (), blob),))

    (graph,) = find_relocations(made(POOL + 512, RANGES), made(OTHER["pool"], ELSEWHERE)).blueprints.graphs
    assert graph.pinned == (0, 1, 2)
    (why,) = find_relocations(
        made(0x1234_5678_0000, RANGES), made(OTHER["pool"], ELSEWHERE)
    ).blueprints.refused.values()
    assert why == "foreign-pointer: node 0 is at no range's address"


def test_shapes_that_differ() -> None:
    one, two = dump([1]), dump([1], ELSEWHERE)
    (graph,) = two.graphs
    others = [
        replace(two, kernels=(two.kernels[0]._replace(name="other"),)),
        replace(two, graphs=(replace(graph, nodes=(graph.nodes[0]._replace(grid=(2, 1, 1)),)),)),
        replace(two, attribute_sets=(((4, bytes(64)),),)),
        replace(two, graphs=(replace(graph, nodes=(*graph.nodes, *graph.nodes), edges=(Edge(0, 1, bytes(8)),)),)),
    ]
    for other in others:
        assert find_relocations(one, other).blueprints.refused["g"].startswith("not-deterministic")


@pytest.mark.parametrize("seed", range(20))
def test_random_words(seed: int) -> None:
    numbers = random.Random(seed)
    first, second, expected = [], [], []
    for position in range(0, 8 * 200, 8):
        kind = numbers.choice(["pointer", "constant", "stale"])
        if kind == "pointer":
            memory_range, offset = numbers.randrange(3), numbers.randrange(0x1000)
            first.append(RANGES[memory_range].address + offset)
            second.append(ELSEWHERE[memory_range].address + offset)
            expected.append((position, RANGES[memory_range].name, offset))
        elif kind == "constant":
            first.append(numbers.choice([0, numbers.getrandbits(32), WEIGHTS + numbers.randrange(1 << 29)]))
            second.append(first[-1])
        else:
            first.append(0x7F00_0000_0000 + numbers.getrandbits(32))
            second.append(0x5500_0000_0000 + numbers.getrandbits(32))
    assert found(first, second) == expected


def test_words_of_a_parameter_are_aligned_to_the_parameters_block() -> None:
    """A structure at offset 4 has its pointer at 8. Two neighbours of four bytes are no pointer together."""
    kernel = KernelRecord("k", "", ((0, 4), (4, 20)), ())
    node = Node(0, 0, 0, (1, 1, 1), (1, 1, 1), 0, 16, 24)

    def made(address: int, ranges: tuple[MemoryRange, ...]) -> Blueprints:
        blob = bytes(16) + struct.pack("<II", 1, 2) + struct.pack("<QQ", address, 5)
        return Blueprints(ranges=ranges, kernels=(kernel,), graphs=(GraphBlueprint("g", (node,), (), blob),))

    proof = find_relocations(made(WEIGHTS, RANGES), made(OTHER["weights"], ELSEWHERE))
    assert [r.position for r in proof.blueprints.graphs[0].relocations] == [24]


def test_ranges_on_one_page_are_mapped_together() -> None:
    granule = 2 << 20
    ranges = [
        MemoryRange("a", RangeKind.NAMED, WEIGHTS + 512, 100),
        MemoryRange("b", RangeKind.NAMED, WEIGHTS + 4096, granule),
        MemoryRange("c", RangeKind.NAMED, WEIGHTS + 2 * granule, 1),
    ]
    spans = _spans(list(reversed(ranges)), granule)
    assert [(span.start, span.size, [memory_range.name for memory_range in span.ranges]) for span in spans] == [
        (WEIGHTS, 2 * granule, ["a", "b"]),
        (WEIGHTS + 2 * granule, granule, ["c"]),
    ]


def test_fingerprints() -> None:
    here = {"gpu": "H200", "driver": "13000", "torch": "2.13", "library.libcublas.so.13": "100"}
    check_fingerprint(here, here)
    check_fingerprint({**here, "library.libcudnn.so.9": "7"}, here)  # loaded at its first use
    for key, reason in [("gpu", Reason.GPU), ("driver", Reason.DRIVER), ("torch", Reason.LIBRARY)]:
        with pytest.raises(GraphMismatch) as caught:
            check_fingerprint({**here, key: "other", "aaa": "1"}, {**here, "aaa": "1"})
        assert caught.value.reason == reason
    with pytest.raises(GraphMismatch, match=r"made for library.libcublas.so.13 99, this is 100"):
        check_fingerprint({**here, "library.libcublas.so.13": "99"}, here)
    with pytest.raises(GraphMismatch, match="gpu: made for gpu H200, this is none"):
        check_fingerprint(here, {"driver": "1"})
