"""`medusa bench coldstart`: what it measures are real processes, and none outlives it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from medusa_adapters.bench.coldstart import command as coldstart
from medusa_adapters.bench.coldstart.contestants import Medusa, Question, Sample
from medusa_adapters.bench.coldstart.rows import make_contestants
from medusa_adapters.bench.process import Process, pss_bytes, rss_bytes
from medusa_adapters.bench.served_instance import ServedInstance, stages_from_json
from medusa_runtime.errors import MedusaError, MissingPackageError
from medusa_runtime.timeline import Stage
from process_tree import alive, descendants

from benchmarks.origin import Origin, Variant

MEDUSA = Path(sys.executable).with_name("medusa")
EXAMPLE = Path(__file__).parents[3] / "examples" / "pydoc-lm"


def bench(*arguments: str | Path, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
    command = [MEDUSA, "bench", "coldstart", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)


def test_ours_from_exec_to_the_first_token(tmp_path: Path) -> None:
    result = bench(
        *("--model", EXAMPLE, "--runs", "1", "--max-tokens", "4"),
        *("--json", tmp_path / "rows.json", "--report", tmp_path / "report.html"),
    )
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "rows.json").read_text())
    rows = {(row["name"], row["metric"]): row for row in found["rows"]}
    assert rows["torch", "ttft_s"]["runs"] == 1
    assert rows["torch", "ttft_s"]["unit"] == "s"
    assert 0 < rows["torch", "ttft_s"]["median"] <= rows["torch", "ready_s"]["median"] + 60
    assert rows["torch", "pss_mb"]["median"] > 50
    assert ("torch", "gap_ms") in rows
    assert found["machine"]["cores"] >= 1
    assert "first token after" in result.stdout
    assert "import" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_second_instance_adds_less_than_the_first() -> None:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "sharing.json"
        sharing = bench(EXAMPLE, "--runs", "1", "--instances", "2", "--json", out)
        assert sharing.returncode == 0, sharing.stderr
        medians = {row["metric"]: row["median"] for row in json.loads(out.read_text())["rows"]}
    assert 0 < medians["added_mb"] < medians["first_mb"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "/nowhere"), "config.json"),
        ((), "expected a checkpoint"),
        ((str(EXAMPLE), "--rows", "torch,tgi"), "vllm-prewarmed"),
        ((str(EXAMPLE), "--runs", "0"), "above 0"),
        ((str(EXAMPLE), "--node"), "--instances N"),
        ((str(EXAMPLE), "--vs", "transformers"), "unrecognized arguments: --vs"),
    ],
)
def test_bad_calls_are_refused(arguments: tuple[str, ...], said: str) -> None:
    result = bench(*arguments)
    assert result.returncode == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_vllm_must_be_installed() -> None:
    with pytest.raises(MissingPackageError, match="pip install 'medusa-runtime"):
        make_contestants(["vllm-cold"], python="/nowhere/python")


def test_a_process_that_fails_is_quoted() -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with Process(command) as process, pytest.raises(MedusaError, match="no such model"):
        process.line()


@pytest.mark.parametrize("port", [None, 9])
def test_a_server_that_does_not_start_is_quoted(port: int | None) -> None:
    """Also one that never listens."""
    command = [sys.executable, "-c", "import sys; sys.exit('out of memory')"]
    with ServedInstance(command, port=port) as instance, pytest.raises(MedusaError, match="out of memory"):
        instance.connect()


def test_a_server_that_never_listens_is_given_up() -> None:
    command = [sys.executable, "-c", "import time; print('thinking', flush=True); time.sleep(60)"]
    said = r"printed no address within 1 s \(still running\): thinking"
    with ServedInstance(command, start_timeout_s=1.0) as instance, pytest.raises(MedusaError, match=said):
        instance.connect()


def test_an_instance_that_fails_is_quoted_with_its_own_error(tmp_path: Path) -> None:
    """It accepts the request first and ends then: the client alone sees no more than a broken connection."""
    with Origin(tmp_path, tmp_path / "scratch", Variant("plain"), builtin=True) as origin:
        question = Question(f"{origin.url}/nothing", "", "x", 1)
        said = r"(?s)serve .*--model .*status 1.*medusa: .*/nothing.*\[Storage\.NotFound\]"
        with pytest.raises(MedusaError, match=said):
            Medusa().sample(question)


def test_a_stream_that_breaks_off_waits_for_the_last_words() -> None:
    script = """
import socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
print(f"listening on http://127.0.0.1:{server.getsockname()[1]}", flush=True)
client, _ = server.accept()
client.recv(65536)
client.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 1000\\r\\n\\r\\ndata: {")
client.close()
time.sleep(0.5)
sys.exit("out of memory")
"""
    with ServedInstance([sys.executable, "-c", script]) as instance:
        said = r"did not answer as expected .*status 1\): .*out of memory"
        with pytest.raises(MedusaError, match=f"(?s){said}"):
            instance.completion(Question("", "", "x", 1).body)


def test_a_process_is_gone_with_its_children_even_those_that_ignore_sigterm() -> None:
    code = (
        "import os, signal, time\n"
        "if not os.fork():\n    os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "    print('child', flush=True); time.sleep(60)\n"
        "time.sleep(60)"
    )
    with Process([sys.executable, "-c", code]) as process:
        assert process.line() == "child\n"
        tree = process.tree()
        assert len(tree) == 2
        assert 0 < pss_bytes(tree) <= rss_bytes(tree)
    assert not [pid for pid in tree if alive(pid)]


def test_what_removes_the_files_of_a_process_may_finish(tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    guard = ["/bin/sh", "-c", "echo ready; read -r _; sleep 0.2; rm -r $0", str(scratch)]
    code = (
        "import subprocess, time\n"
        f"guard = subprocess.Popen({guard!r}, stdin=subprocess.PIPE, start_new_session=True)\n"
        "time.sleep(60)"
    )
    with Process([sys.executable, "-c", code]) as process:
        assert process.line() == "ready\n"
    assert not scratch.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_leaves_nothing(number: int) -> None:
    short = tempfile.mkdtemp(prefix="m")  # a Unix socket lies there
    command = [MEDUSA, "bench", "coldstart", "--model", EXAMPLE, "--runs", "50"]
    env = os.environ | {"TMPDIR": short}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    deadline = time.monotonic() + 60
    while len(tree := descendants(process.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert len(tree) >= 2
    process.send_signal(number)
    process.wait(timeout=240)
    deadline = time.monotonic() + 60
    while (left := [pid for pid in tree if alive(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left
    os.rmdir(short)  # fails when something is left in it


def test_answers_that_differ_end_the_bench() -> None:
    samples = {"torch-import": [Sample(0.5)], "torch": [Sample(1.0, text=" quick brown")]}
    coldstart.check_agreement("transformers", samples, Sample(1.0, text=" quick", first=" quick"))
    with pytest.raises(MedusaError, match="torch and transformers disagree"):
        coldstart.check_agreement("transformers", samples, Sample(1.0, text=" lazy", first=" lazy"))


def test_stages_come_from_what_timeline_answers() -> None:
    answer = {"stages": [{"name": "exec", "process": "s", "start_ns": 1, "end_ns": 5, "detail": {"a": 1}}]}
    assert stages_from_json(answer) == (Stage("exec", "s", 1, 5, {"a": 1}),)
    assert stages_from_json(None) == ()
