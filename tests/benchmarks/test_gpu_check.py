"""The script that checks a GPU: its plumbing here, without one, so that nothing is run for the first time on one."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from process_tree import alive
from waiting import until

from benchmarks.gpu import run, summary
from benchmarks.gpu.figures import report
from benchmarks.gpu.run import Check, Part


def check(tmp_path: Path) -> Check:
    (tmp_path / "work").mkdir()
    (tmp_path / "out").mkdir()
    return Check(tmp_path / "out", tmp_path / "work", dry_run=True, budget_s=300)


@pytest.mark.timeout(600)  # six processes, each of which imports torch
@pytest.mark.slow
def test_a_dry_run_goes_through_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_REPEATS", 1)
    monkeypatch.setattr(run, "_STRATEGIES", ("capture", "medusa"))
    arguments = ["--dry-run", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    assert run.main([*arguments, "--run", "2", "--run", "4"]) == 0
    results = json.loads((tmp_path / "out/results.json").read_text())
    assert list(results) == [
        *(f"tiny-llama {name}" for name in ("materialize", "captured", "restored")),
        *(f"tiny-llama phase {strategy} 0" for strategy in ("capture", "medusa")),
    ]
    assert {part["torch_import"] for part in results.values()} == {"lean"}
    captured, restored = results["tiny-llama captured"], results["tiny-llama restored"]
    assert captured["capture"]["graphs"] == restored["restore"]["graphs"] == 4
    assert captured["hashes"] == restored["hashes"]
    assert {len(digests) for digests in captured["hashes"].values()} == {6}
    assert len({digest for digests in captured["hashes"].values() for digest in digests}) == 12, "inputs are all alike"
    assert captured["eager"]["worst_relative_difference"] == 0
    stages = {stage["name"] for stage in results["tiny-llama phase capture 0"]["stages"]}
    assert {"skeleton", "apply", "kv_plan", "profile", "warm_up", "capture", "ready"} <= stages
    medusas = {stage["name"] for stage in results["tiny-llama phase medusa 0"]["stages"]}
    assert "restore_graphs" in medusas
    assert not medusas & {"profile", "capture"}
    with tarfile.open(tmp_path / "out/run-4.tar.gz") as tar:
        assert {"results.json", "report.html", "summary.txt", "tiny-llama.graphs"} <= set(tar.getnames())
    assert "----  probe: not measured" in (tmp_path / "out/summary.txt").read_text()
    page = (tmp_path / "out/report.html").read_text()
    assert "WITHOUT A GPU" in page
    assert page.count("<svg") == 7  # two timelines, figures 2, 7, 7b, 3 and 9


@pytest.mark.timeout(300)
def test_a_part_that_fails_costs_nothing_but_itself(tmp_path: Path) -> None:
    checking = check(tmp_path)
    model = str(checking.checkpoint("tiny-llama"))
    checking.run(Part("broken", "restored", ("--model", model, "--bundle", str(tmp_path / "nowhere"))))
    assert "FileNotFoundError" in checking.results["broken"]["failed"]
    checking.run(Part("slow", "loading", ("--model", model), timeout_s=0.05))
    assert "timeout" in checking.results["slow"]["failed"]
    checking.run(Part("environment", "environment"))
    facts = checking.results["environment"]
    assert facts["device"] == ""
    assert facts["driver"].startswith("failed: DeviceError")
    kept = json.loads((tmp_path / "out/results.json").read_text())
    assert set(kept) == {"broken", "slow", "environment"}
    facts["torch"] = "kept"
    checking.run(Part("environment", "environment"))
    assert checking.results["environment"]["torch"] == "kept", "what is there was run again"


def test_what_no_minutes_are_left_for_is_named(tmp_path: Path) -> None:
    checking = check(tmp_path)
    checking._end = 0.0
    checking.run(Part("environment", "environment"))
    assert checking.results["environment"] == {"failed": "the minutes were used up"}


def test_two_lanes_run_side_by_side(tmp_path: Path) -> None:
    checking = check(tmp_path)
    wait = "touch {0}/{1}; until [ -e {0}/{2} ]; do sleep 0.02; done; echo '{{}}' > "
    scripts = {"a": wait.format(tmp_path, "a", "b"), "b": wait.format(tmp_path, "b", "a")}
    checking.command = lambda part, result: ["sh", "-c", f"{scripts[part.name]} '{result}'"]  # type: ignore[method-assign]
    lanes = [iter([Part(name, name, timeout_s=60), Part(f"{name} again", name, timeout_s=60)]) for name in scripts]
    run.side_by_side(checking, lanes, [])
    assert sorted(checking.results) == ["a", "a again", "b", "b again"]
    assert not any("failed" in found for found in checking.results.values())
    assert json.loads((tmp_path / "out/results.json").read_text()) == checking.results


def test_what_was_measured_until_the_minutes_were_over_is_packed(tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    Check(out, work, dry_run=True, budget_s=300).keep("tiny-llama captured", {"found": "before"})
    options = ["--dry-run", "--run", "2", "--run", "6", "--minutes", "0.25", "--out", str(out), "--work", str(work)]
    assert run.main(options) == 1
    results = json.loads((out / "results.json").read_text())
    assert results.pop("tiny-llama captured") == {"found": "before"}
    assert results
    assert all("failed" in found for found in results.values())
    for number in (2, 6):
        with tarfile.open(out / f"run-{number}.tar.gz") as tar:
            assert {"results.json", "summary.txt"} <= set(tar.getnames())


def results(**changes: Any) -> dict[str, Any]:
    steps = {"1": {"eager_ms": 5.0, "replay_ms": 2.0, "speedup": 2.5}}
    captured = {"capture": {"seconds": 10.0}, "hashes": {"1": ["a", "a", "b", "b", "c", "c"]}, "steps": steps}
    restored = {
        "restore": {"seconds": 0.5, "graphs": 35, "missing": []},
        "hashes": {"1": ["a", "a", "b", "b", "c", "c"]},
    }
    found: dict[str, Any] = {
        "transfer": {"pinned_gb_s": 50.0, "link": {"first_gb_s": 45.0, "again_gb_s": 48.0}},
        "m materialize": {"seconds": 30.0, "bytes": 40 << 20},
        "m captured": captured,
        "m restored": {**restored, "steps": steps, **changes},
    }
    for strategy, seconds in (("capture", 4.0), ("async", 3.0), ("medusa", 2.0)):
        for number, off in enumerate((0.0, 0.5, -0.5)):
            run = {"strategy": strategy, "loading_s": seconds + off, "first_token_s": seconds + 1, "stages": []}
            found[f"m phase {strategy} {number}"] = run
    return found


def missed(found: dict[str, Any]) -> list[str]:
    return [line for line in summary.lines(found) if line.startswith("MISS")]


def test_targets_that_are_reached_are_said_to_be() -> None:
    said = summary.lines(results())
    assert not missed(results())
    assert "ok    m: loading phase 2.00 s against 4.00 s, 50.0% shorter" in said
    assert any("20.0 times" in line for line in said)


def test_a_promised_row_that_was_not_measured_is_named() -> None:
    found = results()
    del found["m restored"]
    assert "----  llama-3-8b: restoring: not measured" in summary.lines(found)
    assert "----  context beside imports: not measured" in summary.lines(found)
    found["loading"] = {"start": {"context": [0.0, 1.0], "import": [0.1, 3.0]}, "gb_s": 48.0}
    assert "ok    imports hide 90% of the context's 1.00 s" in summary.lines(found)
    assert not any("host to device, of" in line for line in summary.lines(found))


def test_a_slow_or_large_offline_phase_is_a_miss() -> None:
    assert not missed(results())
    for made in ({"seconds": 61.0, "bytes": 1}, {"seconds": 1.0, "bytes": 101 << 20}):
        assert any("materialized in" in line for line in missed(results() | {"m materialize": made}))


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"restore": {"seconds": 1.5, "graphs": 35, "missing": []}}, "restored in 1.50 s"),
        ({"restore": {"seconds": 0.5, "graphs": 34, "missing": [8]}}, "1 missing"),
        ({"hashes": {"1": ["a", "a", "b", "b", "c", "d"]}}, "bits differ: 1"),
        ({"hashes": {}}, "bits differ: 1"),
        ({"steps": {"1": {"eager_ms": 5.0, "replay_ms": 2.1, "speedup": 2.4}}}, "1.050 of captured"),
    ],
)
def test_targets_that_are_missed_are_said_to_be(changes: dict[str, Any], line: str) -> None:
    assert any(line in said for said in missed(results(**changes)))


def test_replays_that_differ_among_themselves_are_no_agreement() -> None:
    assert summary.differing({"4": ["a", "b"]}, {"4": ["a", "b"]}) == ["4"]


def test_a_report_of_nothing_says_so() -> None:
    assert "restoring: not measured" in report({})


def test_what_a_part_has_started_ends_with_it(tmp_path: Path) -> None:
    """A capture that is too slow would otherwise hold the GPU while others are measured."""
    checking = check(tmp_path)
    started = tmp_path / "started"
    script = f"sleep 300 & echo $! > {started}; wait"
    checking.command = lambda part, result: ["sh", "-c", script]  # type: ignore[method-assign]
    checking.run(Part("slow", "slow", timeout_s=2))
    assert "timeout" in checking.results["slow"]["failed"]
    child = int(started.read_text())
    until(lambda: not alive(child))


def test_a_checkpoint_that_cannot_be_made_costs_its_shape_alone(tmp_path: Path) -> None:
    checking = check(tmp_path)
    assert checking.checkpoint("no such shape") is None
    assert "no such shape" in checking.results["checkpoint no such shape"]["failed"]


def test_checkpoints_are_written_while_earlier_parts_run(tmp_path: Path) -> None:
    assert run.shapes_of((1, 2, 4), dry_run=False) == ["llama-3-8b", "qwen2.5-0.5b", "opt-1.3b"]
    assert run.shapes_of((1, 2, 4), ["opt-1.3b"], dry_run=False) == ["opt-1.3b"]
    run.make_ahead(tmp_path, ["no such shape", "tiny-llama"])
    until(lambda: (tmp_path / "tiny-llama/done").exists())
    written = (tmp_path / "tiny-llama/config.json").stat().st_mtime_ns
    (tmp_path / "out").mkdir()
    checking = Check(tmp_path / "out", tmp_path, dry_run=True, budget_s=60)
    assert checking.checkpoint("tiny-llama") == tmp_path / "tiny-llama"
    assert (tmp_path / "tiny-llama/config.json").stat().st_mtime_ns == written, "it was written twice"
    assert checking.checkpoint("no such shape") is None


def test_the_drivers_functions_are_timed_in_a_restore(fake_cuda: Path) -> None:
    from medusa_runtime.state.graphs import place, restore_graphs

    from benchmarks.gpu.timed_driver import TimedDriver
    from benchmarks.graph_restore import blueprints

    driver = TimedDriver(str(fake_cuda))
    driver.call("cuInit", 0)
    driver.call("cuCtxSetCurrent", driver.handle("cuDevicePrimaryCtxRetain", 0))
    made = blueprints(3, 50, 4)
    keys = [graph.key for graph in made.graphs]
    stream = driver.handle("cuStreamCreate", 0)
    with (
        place(driver, made.ranges) as placement,
        restore_graphs(driver, made, placement, keys=keys, stream=stream, fingerprint={}, validate="none") as restored,
    ):
        assert len(restored.graphs) == 3, restored.reasons
    times = driver.times()
    counts = {name: one["calls"] for name, one in times.items()}
    assert counts["cuGraphAddKernelNode_v2"] == 150
    assert counts["cuGraphInstantiateWithParams"] == counts["cuGraphAddDependencies_v2"] == 3
    assert counts["cuLibraryLoadData"] == 5
    assert all(one["seconds"] > 0 for one in times.values())
    loads = times["cuLibraryLoadData"]
    assert loads["from_s"] < loads["to_s"]
    assert loads["from_s"] < times["cuGraphInstantiateWithParams"]["to_s"]  # threads load images beside the building
    threads = driver.threads()
    main = threads.pop("MainThread")
    assert threads, "images are loaded in threads of their own"
    assert {name.partition("_")[0] for name in threads} == {"kernel images", "graphs"}
    assert main["seconds"] > 0
    builders = [one["seconds"] for name, one in threads.items() if name.startswith("graphs_")]
    assert sum(builders) > times["cuGraphAddKernelNode_v2"]["seconds"] + times["cuGraphDestroy"]["seconds"]
    restore = {
        "begin_s": 0.1,
        "build_s": 0.2,
        "calls": {"cuGraphLaunch": {"calls": 4, "seconds": 0.02, "from_s": 0.3, "to_s": 0.33}},
        "threads": {"MainThread": {"seconds": 0.02, "from_s": 0.0, "to_s": 0.33}},
    }
    assert summary._restore_times("tiny", restore) == [
        "tiny: ms of the restore: 100 to begin, 200 to build and check; by function of the driver (calls): "
        "cuGraphLaunch 20 (4)",
        "tiny: ms since its start: replays 300 to 330; in the driver, by thread: MainThread 20",
    ]
    runs = {"1": [{"seconds": 0.3, "graphs": 3}, {"seconds": 0.2, "graphs": 2}], "error": "no memory"}
    assert summary._by_builders("tiny", runs, 3) == [
        "tiny: ms of one more restore, by threads that build graphs: 1: 300, 200 (only 2 graphs); "
        "then it failed: no memory"
    ]
    assert summary._by_builders("tiny", {}, 3) == []
