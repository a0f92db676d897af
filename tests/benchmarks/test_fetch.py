from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from medusa_adapters.bench.result import Result
from medusa_runtime.errors import ConfigError, CorruptError, MedusaError, MissingPackageError

from benchmarks.fetch import __main__ as fetch
from benchmarks.fetch.checkpoint import BUCKET, KEY, make_checkpoint
from benchmarks.fetch.client import Job
from benchmarks.fetch.sample import Contestant
from benchmarks.origin import VARIANTS, Origin

ROOT = Path(__file__).parents[2]


def parsed(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    fetch.add_arguments(parser)
    return parser.parse_args(options)


def test_a_small_run_has_all_rows_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetch, "_memory_folder", lambda plan: str(tmp_path / "served"))
    (tmp_path / "served").mkdir()
    report = tmp_path / "fetch.json"

    only = "medusa,medusa-fresh,raw,raw-populate"
    assert fetch.main(["--runs", "1", "--size-gb", "0.006", "--only", only, "--json", str(report)]) == 0

    rows = {(row["name"], row["metric"]): row for row in json.loads(report.read_text())["rows"]}
    names = ["medusa", "medusa-fresh", "raw", "raw-populate"]
    names += [f"{name}-{variant.name}" for name in ("medusa", "raw") for variant in VARIANTS[1:]]
    assert {name for name, _ in rows} == set(names)
    for name in names:
        assert rows[name, "mb_per_s"]["median"] > 0
        assert rows[name, "cpu_s"]["unit"] == "s/GB"
        assert rows[name, "mb_per_s"]["runs"] == 1
    assert rows["medusa", "extra_mb"]["median"] > 1
    assert list((tmp_path / "served").iterdir()) == []
    assert "bandwidth over raw sockets" in capsys.readouterr().out


def test_bytes_that_differ_from_what_was_served_end_the_run(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "root", 3_000_000)
    with Origin(checkpoint.root, tmp_path / "scratch", VARIANTS[0], builtin=True) as origin:
        path = checkpoint.root / BUCKET / KEY
        damaged = bytearray(path.read_bytes())
        damaged[2_000_000] ^= 1
        path.write_bytes(damaged)
        job = Job(origin.url, BUCKET, KEY, checkpoint.size_bytes, checkpoint.data_start)
        with pytest.raises(CorruptError, match="raw fetched other bytes than were served"):
            fetch._verified(Contestant("raw", "raw", "raw"), job, checkpoint)


@pytest.mark.parametrize("client", ["raw", "raw-populate"])
def test_an_object_that_is_not_there_ends_a_sample_with_the_reason(tmp_path: Path, client: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "root", 1_000_000)
    with Origin(checkpoint.root, tmp_path / "scratch", VARIANTS[0], builtin=True) as origin:
        job = Job(origin.url, BUCKET, "nothing", checkpoint.size_bytes, checkpoint.data_start)
        with pytest.raises(MedusaError, match="404"):
            Contestant(client, "raw", client).sample(job)


def test_a_peer_in_another_environment_gets_this_package_and_no_more(tmp_path: Path) -> None:
    python = tmp_path / "bare" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    job = Job("http://127.0.0.1:9", BUCKET, KEY, 1, 0)
    with pytest.raises(MissingPackageError, match=r"obstore is not installed .*pip install obstore.*--peer-python"):
        Contestant("obstore", "peers", "obstore", python=str(python)).sample(job)


def test_terminating_a_run_stops_and_removes_all_it_started(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom benchmarks.fetch import __main__ as fetch\n"
        "fetch._memory_folder = lambda plan: sys.argv[-1]\n"
        "fetch.main(sys.argv[1:-1])"
    )
    options = ["--runs", "1000", "--size-gb", "0.004", "--only", "raw", "--variants", "plain"]
    with subprocess.Popen(
        [sys.executable, "-c", program, *options, str(tmp_path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as bench:
        assert bench.stderr
        for line in bench.stderr:
            if "1/1000" in line:
                break
        assert list(tmp_path.iterdir())
        bench.send_signal(signal.SIGTERM)
        bench.stderr.read()
        assert bench.wait(60) != 0
    deadline = time.monotonic() + 60
    while _lives(bench.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(bench.pid)
    assert list(tmp_path.iterdir()) == []


def _lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--variants", "plain,moon"], "expected names of plain, tls, limited, latency"),
        (["--only", "medusa,curl"], "found curl"),
        (["--runs", "0"], "above zero"),
        (["--size-gb", "-1"], "above zero"),
        (["--peer-python", "curl=/bin/true"], "expected NAME=PATH with one of boto3"),
        (["--peer-python", "boto3=/no/such/python"], "expected NAME=PATH"),
    ],
)
def test_bad_options_name_what_was_expected(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fetch.plan_of(parsed(*options))


def test_targets_compare_what_was_measured_and_nothing_else() -> None:
    result = Result()
    result.add("medusa", "mb_per_s", "MB/s", [900.0])
    result.add("raw", "mb_per_s", "MB/s", [1000.0])
    result.add("medusa-limited", "mb_per_s", "MB/s", [1500.0])
    result.add("medusa-limited", "connections", "connections", [16.0])

    ratios = {target.text: (target.ratio, target.met) for target in fetch.find_targets(result)}

    assert ratios == {
        "into touched memory, bandwidth over raw sockets": (0.9, True),
        "limited, bandwidth over connections x 100 MB/s": (1500 / 1600, True),
    }


def test_both_ways_to_copy_a_region_are_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.fetch.region_reads", "--mb", "16", "--runs", "2"]
    subprocess.run([*command, "--json", tmp_path / "out.json"], check=True, cwd=ROOT)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert {(row["name"], row["metric"], row["runs"]) for row in rows} == {
        (way, metric, 2) for way in ("mapped", "read") for metric in ("wall", "cpu")
    }
