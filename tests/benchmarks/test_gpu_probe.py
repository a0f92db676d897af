"""The probe of a GPU, on the fake driver. Every step of it runs here, so that none is first run on a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from medusa_runtime.engine.gpu import graph_pool

from benchmarks.gpu import kernels, probe

KEYS = ("product", "rms norm", "copy and zero", "variants", "programmatic pair", "much shared memory")


@pytest.fixture(scope="module")
def evidence(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dry run's folder. The parts of ``benchmarks.gpu.part`` have tests of their own."""
    out = tmp_path_factory.mktemp("probe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "_GROUPS", probe._GROUPS[:2])
        assert probe.main(["--dry-run", "--out", str(out)]) == 0
    return out


def test_what_is_measured_starts_with_bytecode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # as in many containers
    (tmp_path / "imported.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    subprocess.run([sys.executable, "-c", "import imported"], env=probe.environ(), check=True)
    assert list(tmp_path.glob("__pycache__/imported.*.pyc"))


def test_kernels_that_were_brought_along_need_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied files may all be of one time, or the library older than its sources."""
    build = tmp_path / kernels.BUILD.name
    shutil.copy(kernels.BUILD, build)
    monkeypatch.setenv("CC", "no-compiler")
    with pytest.raises(Exception, match="no C compiler"):
        kernels.build_kernels(build)
    library = tmp_path / "libmedusa_kernels.so"
    library.write_bytes(b"brought along")
    os.utime(library, (0, 0))
    kernels.build_kernels(build)
    assert library.read_bytes() == b"brought along"


def rows_of(evidence: Path) -> dict[str, tuple[str, str]]:
    report = json.loads((evidence / "probe/probe.json").read_text())
    return {name: (judged, details) for name, judged, details in report["rows"]}


@pytest.mark.timeout(300)
def test_each_promised_row_is_judged(evidence: Path) -> None:
    found = rows_of(evidence)
    for name in probe._PROMISED:
        assert found[name] == ("ok", f"{len(KEYS)} of {len(KEYS)} graphs")
    assert found["two captures"][0] == found["programmatic edges"][0] == found["an image for each kernel"][0] == "ok"
    assert {found[name][0] for name in probe._OF_THE_MACHINE} == {"----"}
    assert found["pool at its address"] == ("ok", "2 MiB at 0x680000000000")


def test_the_pools_row() -> None:
    assert probe.POOL_BASE == graph_pool.POOL_BASE
    first: dict[str, Any] = {"pool": {"at": "0x680000000000", "bytes": 5 << 20}}
    moved = ["graph pool", "workspace 64 0"]
    name = "pool at its address"
    assert probe._pool_row({"first": first}) == (name, "----", "not measured")
    elsewhere = "restored elsewhere: graph pool; restored elsewhere: workspace 64 0"
    assert probe._pool_row({"first": first, "restore": {"moved": moved}}) == (name, "MISS", elsewhere)
    taken = {"pool": {"at": "0x500000000000", "bytes": 0}}
    assert probe._pool_row({"first": taken, "restore": {"moved": []}})[1:] == ("MISS", "captured at 0x500000000000")
    own = probe._pool_row({"first": {"pool": "torch's own"}, "restore": {"moved": []}})
    assert own == (name, "MISS", "captured in torch's own; see first.log")


@pytest.mark.timeout(300)
def test_the_evidence_is_what_a_failure_is_reproduced_with(evidence: Path) -> None:
    with tarfile.open(evidence / "probe.tar.gz") as tar:
        names = set(tar.getnames())
    wanted = ("first.json", "first.log", "first.dump", "second.dump", "bundle", "restore.json", "probe.json")
    assert {f"probe/{name}" for name in wanted} <= names
    first = json.loads((evidence / "probe/first.json").read_text())
    images = {path.stem for path in (evidence / "probe/images").iterdir()}
    assert len(images) == 4, "with one that might have been it"
    used = {node["image"]["by handle"] for key in KEYS for node in first[f"graph {key}"]["nodes"] if "image" in node}
    assert used <= images
    pair = first["graph programmatic pair"]
    assert pair["edges"][1][2] == "0100010000000000"
    cluster = pair["nodes"][2]
    assert cluster["attributes"]["6"] == [0, "01"]
    assert cluster["attributes"]["4"] == [0, "020000000100000001"]
    assert cluster["attributes"]["3"][0] == 1, "the driver's return code of an attribute that nodes do not have"
    attends = [node["image"] for node in first["graph variants"]["nodes"] if node.get("name") == "attend"]
    assert {image["by name"] for image in attends} == {""}, "two modules define it alike"
    assert len({image["by handle"] for image in attends}) == 2
    assert len(pair["parameters"]) == 3
    assert first["same process by image: variants"]["read back"] == []


def test_what_is_too_large_is_left_out_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/small").write_bytes(bytes(10))
    (tmp_path / "out/large").write_bytes(bytes(1000))
    (tmp_path / "beside").write_bytes(bytes(20))
    with tarfile.open(probe.pack(tmp_path / "out", "it.tar.gz", beside=[tmp_path / "beside"], most_bytes=500)) as tar:
        assert tar.getnames() == ["small", "beside"]
    assert "too large for it.tar.gz: large (1000 bytes)" in capsys.readouterr().out


def results(**changes: Any) -> dict[str, Any]:
    first = {f"graph {key}": {"nodes": [], "edges": []} for key in ("a", "b")}
    first |= {f"same process by handle: {key}": {"equal": True, "read back": []} for key in ("a", "b")}
    return {"first": first | changes, "restore": {"restored: a": {"equal": True}}}


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({}, ("ok", "2 of 2 graphs")),
        (
            {"same process by handle: b": {"failed": "driver-call: no"}},
            ("MISS", "1 of 2 graphs; b (driver-call: no)"),
        ),
        ({"same process by handle: a": {"equal": False, "read back": []}}, ("MISS", "1 of 2 graphs; a (other bits)")),
        (
            {"same process by handle: a": {"equal": True, "read back": ["edges"]}},
            ("MISS", "2 of 2 graphs; a reads back otherwise"),
        ),
    ],
)
def test_what_was_reached_missed_or_not_measured_is_said(changes: dict[str, Any], row: tuple[str, str]) -> None:
    found = {name: (judged, details) for name, judged, details in probe.rows(results(**changes))}
    assert found["same process by handle"] == row
    assert found["same process by saved image"] == ("----", "not measured")
    assert found["fresh process, same addresses"] == ("MISS", "1 of 2 graphs; b was not reached")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("trouble", "why"), [("FAULT", "ILLEGAL_ADDRESS"), ("HANG", "the process ended in it")])
def test_a_case_that_breaks_the_context_or_never_ends_costs_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str, why: str
) -> None:
    """Both in the process that captures and in those that restore; what was captured is never at fault here."""
    monkeypatch.setenv(f"FAKE_CUDA_{trouble}", "cluster_scale")
    monkeypatch.setenv("PROBE_CASE_S", "4")
    monkeypatch.setattr(probe, "_GROUPS", probe._GROUPS[:2])
    assert probe.main(["--dry-run", "--out", str(tmp_path)]) == 1
    found = rows_of(tmp_path)
    for name in probe._PROMISED:
        judged, details = found[name]
        assert judged == "MISS"
        assert details.startswith(f"{len(KEYS) - 1} of {len(KEYS)} graphs; programmatic pair (")
        assert why in details
    assert found["two captures"][0] == "ok"
    log = (tmp_path / "probe/restore.log").read_text()
    assert ("in run" if trouble == "HANG" else "CUDA_ERROR_ILLEGAL_ADDRESS") in log, "where it was"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_overwriting_memory_that_never_ends_leaves_the_other_steps_a_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CUDA_HANG_ON_POISON", "1")
    monkeypatch.setenv("PROBE_CASE_S", "4")
    monkeypatch.setattr(probe, "_GROUPS", probe._GROUPS[:2])
    assert probe.main(["--dry-run", "--out", str(tmp_path)]) == 1
    found = rows_of(tmp_path)
    assert found["two captures"] == ("MISS", "the process ended in it; the log says where")
    for name in probe._PROMISED:
        assert found[name] == ("ok", f"{len(KEYS)} of {len(KEYS)} graphs")


def test_a_step_that_hangs_or_fails_costs_its_own_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probe._LIMITS, "hangs", 0.5)
    running = probe.Probe(tmp_path, library=None, seconds=60)
    commands = {"hangs": ["sleep", "100"], "fails": ["sh", "-c", "echo no device; exit 3"], "works": ["true"]}
    monkeypatch.setattr(running, "_command", commands.get)
    running.run(["hangs", "fails", "missing"])
    running.run(["works"])
    assert running.results["hangs"]["status"] == "timeout"
    assert (running.results["fails"]["status"], running.results["fails"]["failed"]) == (3, "no device")
    assert running.results["missing"] == {"not measured": "it is not here"}
    assert running.results["works"]["status"] == 0
