"""Graphs captured in one process and replayed in another, on the fake driver."""

from __future__ import annotations

import json
import struct
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.state.graphs import Blueprints, GraphRestorer
from medusa_runtime.state.graphs.blob_format import decode_blueprints
from medusa_runtime.state.graphs.restoration.kernels import KernelFinder

KEYS = ["decode-1", "decode-2", "decode-4"]
OTHER_BASE = 0x580000000000


def test_everything_of_a_graph_is_in_the_blueprint(materialized: dict[str, Any]) -> None:
    blueprints = decode_blueprints(Path(materialized["path"]).read_bytes())
    graph = blueprints.graph("decode-1")
    assert {node.kind for node in graph.nodes} == {0, 1, 2}
    assert {edge.data for edge in graph.edges} == {bytes(8), bytes([1, 0, 1, 0, 0, 0, 0, 0])}
    sets = {entry for node in graph.nodes for entry in blueprints.attribute_sets[node.attributes]}
    cluster, priority = struct.pack("<III", 2, 1, 1), struct.pack("<i", -2)
    programmatic = struct.pack("<i", 1)
    assert sets == {
        (number, value.ljust(64, b"\0")) for number, value in ((4, cluster), (6, programmatic), (8, priority))
    }
    assert len({edge.source for edge in graph.edges}) < len(graph.edges), "two streams: a node with two successors"
    assert sum(kernel.name == "scale" for kernel in blueprints.kernels) == 2
    assert all(kernel.image in blueprints.images for kernel in blueprints.kernels)
    assert len(blueprints.images) == 2
    named = {blueprints.ranges[relocation.memory_range].name.rpartition(":")[2] for relocation in graph.relocations}
    assert named == {"weights", "kv cache", "graph inputs", "graph outputs", "pool", "workspace", "bias_table"}
    assert materialized["pinned"] == []
    assert [entry[:2] for entry in materialized["contents"]] == [["workspace", 512]]
    assert "'stale':" in materialized["log"]


def test_restored_at_the_captured_addresses(toy: Any, materialized: dict[str, Any]) -> None:
    restored = toy("restore", {"bundle": materialized["path"], "validate": "all"}, base=OTHER_BASE)
    assert restored["restored"] == KEYS
    assert restored["at"] == materialized["at"]
    assert restored["answers"] == materialized["answers"]
    assert "captured, not restored" not in restored["log"]

    def built(log: str) -> list[str]:
        return sorted(line for line in log.splitlines() if line.startswith("graph: "))

    assert built(restored["log"]) == built(materialized["log"])
    assert len(built(restored["log"])) == len(KEYS)
    assert ", 0 programmatic" not in restored["log"]


@pytest.mark.parametrize("driver", ["FAKE_CUDA_OWN_EDGE_DATA", "FAKE_CUDA_LAUNCH_ONLY"])
def test_other_drivers(toy: Any, materialized: dict[str, Any], driver: str) -> None:
    """One that gives each edge of a call its own data, and one that knows attribute 6 of launches only."""
    restored = toy("restore", {"bundle": materialized["path"]}, base=OTHER_BASE, **{driver: "1"})
    assert restored["answers"] == materialized["answers"]
    programmatic, expected = (
        sorted(line.split(", ")[2] for line in one["log"].splitlines() if line.startswith("graph: "))
        for one in (restored, materialized)
    )
    assert programmatic == expected


@pytest.fixture(scope="module")
def more(toy: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A bundle of a step with variants of one kernel, constants that the host has written, and a large cluster."""
    folder = tmp_path_factory.mktemp("more")
    options = {"more": True, "wide_cluster": True, "batches": [1, 2]}
    dump = {**options, "dump": str(folder / "second"), "order": 1}
    toy("dump", dump, base=0x500000000000, FAKE_CUDA_HANDLES="0x540000000000")
    made = toy("materialize", {**options, "out": str(folder / "bundle"), "second": str(folder / "second")})
    return {**made, "path": str(folder / "bundle")}


def test_variants_of_a_kernel_keep_their_own_images(toy: Any, more: dict[str, Any]) -> None:
    """Triton compiles one name for several constants, and then name, parameters and registers are all alike."""
    blueprints = decode_blueprints(Path(more["path"]).read_bytes())
    variants = [kernel for kernel in blueprints.kernels if kernel.name == "attend"]
    assert len({kernel.image for kernel in variants}) == len(variants) == 2
    assert len({(kernel.parameters, kernel.attributes) for kernel in variants}) == 1
    restored = toy("restore", {"bundle": more["path"], "keys": KEYS[:2]}, base=OTHER_BASE)
    assert restored["restored"] == KEYS[:2]
    assert restored["answers"] == more["answers"]


def test_constants_that_the_host_has_written_come_back(toy: Any, more: dict[str, Any]) -> None:
    """cudaMemcpyToSymbol writes to one copy of an image, and a restored kernel is in another."""
    assert [(name.rpartition(":")[2], size) for name, _, size in more["contents"]] == [
        ("gains", 16),
        ("workspace", 3584),
    ]
    options = {"bundle": more["path"], "keys": KEYS[:2], "change": "contents"}
    restored = toy("restore", options, base=OTHER_BASE)
    assert {reason.partition(":")[0] for reason in restored["reasons"].values()} == {"output"}


def test_restored_at_other_addresses(toy: Any, materialized: dict[str, Any]) -> None:
    restored = toy("restore", {"bundle": materialized["path"], "mode": "relocate"}, base=OTHER_BASE)
    assert restored["restored"] == KEYS
    assert not set(restored["at"].values()) & set(materialized["at"].values())
    assert restored["answers"] == materialized["answers"]


def test_a_taken_address_is_relocated(toy: Any, materialized: dict[str, Any]) -> None:
    taken = materialized["at"]["weights"]
    restored = toy("restore", {"bundle": materialized["path"], "take": [taken]}, base=OTHER_BASE)
    assert restored["at"]["weights"] != taken
    assert restored["answers"] == materialized["answers"]
    assert "is taken: weights" in restored["log"]


def test_a_driver_that_gives_no_chosen_address(toy: Any, materialized: dict[str, Any]) -> None:
    restored = toy("restore", {"bundle": materialized["path"]}, base=OTHER_BASE, FAKE_CUDA_NO_HINTS="1")
    assert restored["answers"] == materialized["answers"]
    assert not set(restored["at"].values()) & set(materialized["at"].values())


def test_allocations_made_again_lead_to_the_same_memory(toy: Any, materialized: dict[str, Any]) -> None:
    """The oracle (MEDUSA §4.2), with an allocator that returns other addresses than the traced one."""
    restored = toy("restore", {"bundle": materialized["path"], "mode": "replay"}, base=OTHER_BASE)
    assert "allocation 0" in restored["through"]
    assert "pool" not in restored["through"], "each pointer into the pool is one into an allocation"
    assert restored["restored"] == KEYS
    assert restored["answers"] == materialized["answers"]


def test_the_papers_false_positive_is_seen(toy: Any, materialized: dict[str, Any]) -> None:
    """Figure 6: matched by address alone, a pointer gets another allocation, and validation notices it."""
    options = {"bundle": materialized["path"], "mode": "replay", "first_match": True, "validate": "all"}
    restored = toy("restore", options, base=OTHER_BASE)
    assert restored["restored"] == []
    assert {reason.partition(":")[0] for reason in restored["reasons"].values()} == {"output"}


@pytest.mark.parametrize("change", ["attributes", "edges", "contents"])
def test_what_is_left_out_is_noticed(toy: Any, materialized: dict[str, Any], change: str) -> None:
    restored = toy("restore", {"bundle": materialized["path"], "change": change}, base=OTHER_BASE)
    assert restored["restored"] == []
    assert {reason.partition(":")[0] for reason in restored["reasons"].values()} == {"output"}


def test_kernels_by_triggering(toy: Any, materialized: dict[str, Any]) -> None:
    """MEDUSA §5.2: without images, a captured first layer leads to the modules with all kernels and variables."""
    options = {"bundle": materialized["path"], "change": "images", "trigger": "once"}
    restored = toy("restore", options, base=OTHER_BASE)
    assert restored["restored"] == KEYS
    assert restored["answers"] == materialized["answers"]


def test_a_module_that_two_triggers_meet_is_listed_once(toy: Any, materialized: dict[str, Any]) -> None:
    """Batch sizes have kernels of their own, such as products' tiles, so the next size triggers again."""
    options = {"bundle": materialized["path"], "change": "images", "trigger": "late"}
    restored = toy("restore", options, base=OTHER_BASE)
    assert restored["restored"] == KEYS[1:]
    assert restored["reasons"] == {KEYS[0]: "kernel-missing: embed is in no saved image or triggered module"}


def test_saved_images_missing(toy: Any, materialized: dict[str, Any]) -> None:
    restored = toy("restore", {"bundle": materialized["path"], "change": "images"}, base=OTHER_BASE)
    assert restored["restored"] == []
    assert all(reason.startswith("kernel-missing") for reason in restored["reasons"].values())


def test_what_the_driver_refuses_is_named(toy: Any, materialized: dict[str, Any]) -> None:
    """A kernel asks for more shared memory than it was allowed."""
    restored = toy("restore", {"bundle": materialized["path"], "change": "allowances"}, base=OTHER_BASE)
    assert restored["restored"] == []
    (reason,) = set(restored["reasons"].values())
    assert reason.startswith("driver-call: cuGraphAddKernelNode_v2 failed: CUDA_ERROR_INVALID_VALUE (1): wide, ")
    assert " bytes of shared memory, attributes [" in reason


def test_one_log_line(toy: Any, materialized: dict[str, Any]) -> None:
    restored = toy("restore", {"bundle": materialized["path"], "change": "names"}, base=OTHER_BASE)
    lines = [line for line in restored["log"].splitlines() if "captured, not restored" in line]
    assert len(lines) == 1
    assert lines[0].startswith("3 CUDA graphs are captured, not restored: kernel-missing: ")


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({"FAKE_CUDA_NAME": "Fake B200"}, "gpu: made for gpu Fake H200, this is Fake B200"),
        ({"FAKE_CUDA_DRIVER": "13010"}, "driver: made for driver 13000, this is 13010"),
    ],
)
def test_another_machine(toy: Any, materialized: dict[str, Any], environment: dict[str, str], reason: str) -> None:
    restored = toy("restore", {"bundle": materialized["path"]}, **environment)
    assert restored["restored"] == []
    assert set(restored["reasons"].values()) == {reason}


def test_another_torch(toy: Any, materialized: dict[str, Any]) -> None:
    restored = toy("restore", {"bundle": materialized["path"], "torch": "2.14"})
    assert set(restored["reasons"].values()) == {"library: made for torch 2.13, this is 2.14"}


def test_other_weights(toy: Any, materialized: dict[str, Any]) -> None:
    restored = toy("restore", {"bundle": materialized["path"], "wrong_weights": True, "validate": "all"})
    assert {reason.partition(":")[0] for reason in restored["reasons"].values()} == {"output"}


def test_too_little_memory(toy: Any, materialized: dict[str, Any]) -> None:
    restored = toy("restore", {"bundle": materialized["path"]}, FAKE_CUDA_MEMORY=str(4 << 20))
    assert restored["placement"] == "memory: expected 12 MiB of free memory, found 4 MiB"


def test_memory_that_is_taken_meanwhile(toy: Any, materialized: dict[str, Any]) -> None:
    """Enough memory is free when asked, but not when allocated: nothing stays mapped, and nothing crashes."""
    restored = toy("restore", {"bundle": materialized["path"]}, FAKE_CUDA_LIES="1", FAKE_CUDA_MEMORY=str(4 << 20))
    assert restored["placement"] == "memory: cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2)"


def test_ranges_that_were_not_placed(toy: Any, materialized: dict[str, Any]) -> None:
    restored = toy("restore", {"bundle": materialized["path"], "forget": ["kv cache"]}, base=OTHER_BASE)
    assert set(restored["reasons"].values()) == {"memory-range: kv cache was not placed"}


def test_a_replay_that_breaks_the_context(toy: Any, materialized: dict[str, Any]) -> None:
    """It is reported before any token, as an error, because nothing can be captured in this process either."""
    options = {"bundle": materialized["path"], "misplace": {"kv cache": 0x123400000000}}
    lost = toy("restore", options, base=OTHER_BASE)["lost"]
    assert (
        "broke the context (cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS (700)); start with --state none"
        in lost
    )


def test_unknown_sizes(toy: Any, materialized: dict[str, Any]) -> None:
    restored = toy("restore", {"bundle": materialized["path"], "keys": ["decode-2", "decode-3"]})
    assert restored["restored"] == ["decode-2"]
    assert restored["reasons"] == {"decode-3": "absent: it was not materialized"}


def test_a_damaged_image_rejects_the_graphs_that_use_it(toy: Any, more: dict[str, Any]) -> None:
    options = {"bundle": more["path"], "keys": KEYS[:2], "damage": "gains", "validate": "none"}
    restored = toy("restore", options, base=OTHER_BASE)
    assert restored["restored"] == [KEYS[1]]
    (reason,) = restored["reasons"].values()
    assert reason.startswith("corrupt: the kernel image ")
    assert reason.endswith(" is damaged (its sha256 is wrong); materialize again")
    assert f"1 CUDA graphs are captured, not restored: {reason}" in restored["log"]


def damaged(data: bytes) -> dict[str, bytes]:
    middle = len(data) // 2
    return {
        "empty": b"",
        "cut": data[:middle],
        "one byte short": data[:-1],
        "longer": data + b"\0",
        "flipped in the header": data[:70] + bytes([data[70] ^ 4]) + data[71:],
        "flipped in the body": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
        "another file": json.dumps({"not": "graphs"}).encode() * 100,
    }


@pytest.mark.parametrize("how", list(damaged(bytes(200))))
def test_damaged_bundles(toy: Any, materialized: dict[str, Any], tmp_path: Path, how: str) -> None:
    bundle = tmp_path / "bundle"
    bundle.write_bytes(damaged(Path(materialized["path"]).read_bytes())[how])
    restored = toy("restore", {"bundle": str(bundle)})
    assert restored["restored"] == []
    assert {reason.partition(":")[0] for reason in restored["reasons"].values()} == {"corrupt"}
    assert "materialize again" in restored["error"]


def test_graphs_whose_images_are_loaded_are_built_while_a_large_image_is_still_loading(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[str] = []
    restorer = GraphRestorer.__new__(GraphRestorer)
    finder = KernelFinder(None, Blueprints())  # type: ignore[arg-type] # nothing is asked of the driver
    large, small, last = Future[int](), Future[int](), Future[int]()
    finder._libraries.update(large=large, small=small, last=last)
    finder._loading.update(finder._libraries)
    images = {"1": ("small", "large"), "8": ("small",), "16": ("last",), "absent": ()}
    restorer._finder = finder

    def build(key: str, build: Any) -> None:
        built.append(key)
        if key == "8":
            last.set_result(2)
        elif key == "16":
            large.set_result(3)

    monkeypatch.setattr(restorer, "_prepared", lambda key: key)
    monkeypatch.setattr(restorer, "_build", build)
    monkeypatch.setattr(restorer, "begin_loading", lambda keys: None)
    monkeypatch.setattr(restorer, "_images", images.__getitem__)
    loading = threading.Timer(0.05, small.set_result, (1,))
    loading.start()
    left = ["1", "8", "16", "absent"]
    while left:
        left.remove(restorer.build_one(left))
    loading.join()
    assert built == ["absent", "8", "16", "1"]
