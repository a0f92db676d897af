"""What the offline phase refuses, and what it can only restore at the captured addresses."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.state.graphs import Blueprints, MemoryRange, RangeKind
from medusa_runtime.state.graphs.blob_format import decode_blueprints
from medusa_runtime.state.graphs.blueprint import GraphBlueprint, Relocation
from medusa_runtime.state.graphs.materialization.poison import _pieces

OTHER_BASE = 0x580000000000


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ({"host": 2}, "host"),
        ({"kind": 4}, "child graph"),
        ({"kind": 6}, "event wait"),
        ({"kind": 7}, "event record"),
        ({"kind": 9}, "semaphore wait"),
        ({"kind": 10}, "memory allocation"),
        ({"kind": 12}, "batch memory operation"),
        ({"kind": 13}, "conditional"),
        ({"kind": 99}, "type 99"),
    ],
)
def test_nodes_that_cannot_be_materialized(
    toy: Any, second: Path, tmp_path: Path, option: dict[str, int], name: str
) -> None:
    bundle, reason = tmp_path / "bundle", f"node-kind: it has a {name} node"
    made = toy("materialize", {"out": str(bundle), "second": str(second), **option})
    assert made["refused"] == {"decode-2": reason}
    assert f"1 CUDA graphs are not materialized: {reason}" in made["log"]
    restored = toy("restore", {"bundle": str(bundle)}, base=OTHER_BASE)
    assert restored["restored"] == ["decode-1", "decode-4"]
    assert restored["reasons"] == {"decode-2": reason}


def test_memory_that_nobody_named(toy: Any, second: Path, tmp_path: Path) -> None:
    made = toy("materialize", {"out": str(tmp_path / "bundle"), "second": str(second), "unnamed": ["workspace"]})
    assert set(made["refused"]) == {"decode-1", "decode-2", "decode-4"}
    assert all(reason.startswith(("foreign-pointer", "not-deterministic")) for reason in made["refused"].values())

    made = toy("materialize", {"out": str(tmp_path / "bundle"), "unnamed": ["workspace"]})
    assert all(reason.startswith("foreign-pointer") for reason in made["refused"].values())
    assert len(made["refused"]) == 3


@pytest.mark.parametrize("reads_host", [True, False])
def test_stale_addresses_of_pinned_memory_are_replaced(toy: Any, tmp_path: Path, reads_host: bool) -> None:
    """A copy before a launch leaves such an address on the stack, for example of torch's pinned buffers."""
    other, bundle = str(tmp_path / "second"), str(tmp_path / "bundle")
    toy("dump", {"dump": other, "pinned": 1, "order": 1}, base=OTHER_BASE, FAKE_CUDA_HANDLES="0x540000000000")
    made = toy("materialize", {"out": bundle, "second": other, "pinned": 1, "reads_host": reads_host})
    assert made["refused"] == {}
    replaced = b"\0\0\0\0\0\0\xad\xde"  # of the toy's address 4096 bytes into its buffer
    gemvs = {"decode-1": 3, "decode-2": 6, "decode-4": 12}
    graphs = decode_blueprints(Path(bundle).read_bytes()).graphs
    assert {graph.key: graph.blob.count(replaced) for graph in graphs} == gemvs
    assert f"{sum(gemvs.values())} words with addresses of pinned memory of the host are replaced" in made["log"]
    assert toy("restore", {"bundle": bundle, "validate": "all"}, base=OTHER_BASE)["answers"] == made["answers"]


@pytest.mark.parametrize(
    ("reader", "reads_host", "is_refused"), [("gemv", True, False), ("embed", True, True), ("embed", False, False)]
)
def test_a_kernel_that_reads_pinned_memory_is_never_restored(
    toy: Any, tmp_path: Path, reader: str, reads_host: bool, is_refused: bool
) -> None:
    """One has the address inside a structure, the other as a parameter of its own, which can hardly be stale."""
    other, bundle = str(tmp_path / "second"), str(tmp_path / "bundle")
    options = {"on_host": reader, "reads_host": reads_host}
    toy("dump", {"dump": other, "order": 1, **options}, base=OTHER_BASE, FAKE_CUDA_HANDLES="0x540000000000")
    made = toy("materialize", {"out": bundle, "second": other, **options})
    if is_refused:
        assert {reason.partition(":")[0] for reason in made["refused"].values()} == {"foreign-pointer"}
        return
    assert made["refused"] == {}
    restored = toy("restore", {"bundle": bundle, "validate": "all"}, base=OTHER_BASE)
    assert "broke the context (cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS" in restored["lost"]


def test_one_capture_only_holds_at_its_addresses(toy: Any, materialized: dict[str, Any], tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    made = toy("materialize", {"out": str(bundle)})
    assert set(made["pinned"]) == set(made["at"])
    restored = toy("restore", {"bundle": str(bundle)}, base=OTHER_BASE)
    assert restored["answers"] == materialized["answers"]
    restored = toy("restore", {"bundle": str(bundle), "mode": "relocate"}, base=OTHER_BASE)
    assert restored["restored"] == []
    assert all(reason.startswith("address: expected ") for reason in restored["reasons"].values())


def test_words_that_changed_unexplained(toy: Any, second: Path, tmp_path: Path, materialized: dict[str, Any]) -> None:
    """Like an address in a form of its own: right where it was captured, unknown elsewhere."""
    bundle = tmp_path / "bundle"
    made = toy("materialize", {"out": str(bundle), "second": str(second), "opaque": 0x1234567890})
    assert set(made["pinned"]) == set(made["at"])
    assert toy("restore", {"bundle": str(bundle)}, base=OTHER_BASE)["answers"] == materialized["answers"]
    taken = {"bundle": str(bundle), "take": [made["at"]["pool"]]}
    reasons = toy("restore", taken, base=OTHER_BASE)["reasons"]
    assert {reason.partition(" ")[0] for reason in reasons.values()} == {"address:"}


def test_contents_of_pinned_memory_are_looked_for_from_its_start() -> None:
    """Not all pointers of such a graph are known, so one may lead to before the first that is."""
    pool = MemoryRange("graph pool", RangeKind.SLAB, 0x6800_0000_0000, 4096)
    graph = GraphBlueprint("g", (), (), bytes(16), (Relocation(0, 0, 512), Relocation(8, 0, 1024)))
    for pinned, offsets in (((), [512, 1024]), ((0,), [0, 512, 1024])):
        pieces = _pieces(Blueprints(ranges=(pool,), graphs=(replace(graph, pinned=pinned),)))
        assert [piece.offset for piece in pieces] == offsets
        assert pieces[-1].offset + len(pieces[-1].data) == pool.size


def not_position_independent() -> str | None:
    """A Python of this version with code and heap among small numbers, such as Debian's; None where there is none."""
    python = os.path.realpath("/usr/bin/python3")
    try:
        with open(python, "rb") as program:
            kind = int.from_bytes(program.read(18)[16:], sys.byteorder)
        asked = [python, "-c", "import sys; print(sys.version_info[:2])"]
        same = subprocess.check_output(asked, text=True, timeout=240).strip() == str(sys.version_info[:2])
    except (OSError, subprocess.SubprocessError):
        return None
    return python if kind == 2 and same else None  # ET_EXEC


def test_stale_addresses_of_a_python_that_is_not_position_independent(toy: Any, tmp_path: Path) -> None:
    """Its heap cannot be told from numbers by its place, so the dump says where it is."""
    python = not_position_independent()
    if python is None:
        pytest.skip("every Python here is position-independent")
    other, bundle, paths = str(tmp_path / "second"), str(tmp_path / "bundle"), os.pathsep.join(sys.path)
    elsewhere = {"FAKE_CUDA_HANDLES": "0x540000000000", "PYTHONPATH": paths}
    toy("dump", {"dump": other, "order": 1}, base=0x500000000000, python=python, **elsewhere)
    made = toy("materialize", {"out": bundle, "second": other}, python=python, PYTHONPATH=paths)
    assert made["pinned"] == []
    assert "'stale':" in made["log"]
    restored = toy("restore", {"bundle": bundle, "mode": "relocate"}, base=OTHER_BASE)
    assert restored["answers"] == made["answers"]


def test_another_second_capture(toy: Any, tmp_path: Path) -> None:
    """Captures that differ prove nothing, so nothing of them is kept."""
    path = tmp_path / "dump"
    toy("dump", {"dump": str(path), "batches": [1, 2], "order": 1}, base=0x500000000000)
    made = toy("materialize", {"out": str(tmp_path / "bundle"), "second": str(path)})
    assert made["refused"] == {"decode-4": "not-deterministic: captured only once"}

    toy("dump", {"dump": str(path), "short": True, "order": 1}, base=0x500000000000)
    made = toy("materialize", {"out": str(tmp_path / "bundle"), "second": str(path)})
    assert all(reason.startswith("not-deterministic: two captures differ") for reason in made["refused"].values())
    assert len(made["refused"]) == 3


def test_kernels_that_cannot_be_told_apart_are_triggered(
    toy: Any, second: Path, tmp_path: Path, materialized: dict[str, Any]
) -> None:
    bundle = tmp_path / "bundle"
    toy("materialize", {"out": str(bundle), "second": str(second), "ambiguous": True})
    restored = toy("restore", {"bundle": str(bundle)}, base=OTHER_BASE)
    missing = "kernel-missing: scale is in no saved image or triggered module"
    assert set(restored["reasons"].values()) == {missing}

    restored = toy("restore", {"bundle": str(bundle), "trigger": "once"}, base=OTHER_BASE)
    assert restored["answers"] == materialized["answers"]

    restored = toy("restore", {"bundle": str(bundle), "trigger": "fails"}, base=OTHER_BASE)
    assert restored["reasons"]["decode-1"].startswith("kernel-missing: triggering decode-1 failed: ")

    restored = toy("restore", {"bundle": str(bundle), "trigger": "twins"}, base=OTHER_BASE)
    assert restored["restored"] == []
    assert all(reason.startswith("kernel-ambiguous: scale is defined in ") for reason in restored["reasons"].values())
