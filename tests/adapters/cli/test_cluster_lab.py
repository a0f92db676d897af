"""`medusa cluster lab` as a user runs it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from medusa_cluster.lab.laboratory import check_machine
from process_tree import alive, descendants
from strangers import ALICE, as_user
from waiting import until

MEDUSA = Path(sys.executable).with_name("medusa")
EXAMPLE = Path(__file__).parents[3] / "examples" / "pydoc-lm"


def lab(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [MEDUSA, "cluster", "lab", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--bare", "--nodes", "0"), "--nodes: expected a number from 1 to 64, found 0"),
        (("--bare", "--link", "fast"), "--link: expected a rate such as 400mbit or 50MB"),
        (("--bare", "--cpus", "0"), "--cpus: expected a number of cores"),
        (("--bare", "--gateway-port", "0"), "--gateway-port: expected a port"),
        (("--bare", "--model", "s3://bucket/qwen"), "fetch it first: medusa fetch URL --to FOLDER"),
        (("--bare", "--model", "/nowhere"), "expected the folder of a checkpoint, found '/nowhere'"),
        (("--bare", "--model", f"a b={EXAMPLE}"), "expected a name of its own"),
        (("--bare", "--model", f"{EXAMPLE}", "--model", f"{EXAMPLE}"), "found 'pydoc-lm'"),
    ],
)
def test_bad_calls_are_refused_in_one_line(arguments: tuple[str, ...], said: str) -> None:
    ran = lab(*arguments)
    assert (ran.returncode, ran.stdout) == (2, "")
    (line,) = ran.stderr.splitlines()
    assert said in line


@pytest.mark.root
def test_who_is_not_root_is_told_so() -> None:
    said = as_user(ALICE, check_machine)
    assert said.startswith(
        "ConfigError: medusa cluster lab makes network namespaces, which needs root; this process lacks"
    )
    assert "\n" not in said


@pytest.mark.cluster
@pytest.mark.root
def test_a_command_runs_on_the_first_node_and_its_status_is_ours() -> None:
    script = "hostname; curl -s http://origin/pydoc-lm/config.json | grep -c hidden_size; exit 4"
    ran = lab("--bare", "--nodes", "2", "--link", "400mbit", "--model", EXAMPLE, "--", "sh", "-c", script)
    assert (ran.returncode, ran.stdout.split()) == (4, ["n1", "1"])
    assert "2 nodes, links of 400 Mbit/s each way; no processor quotas were asked for" in ran.stderr
    assert "origin  http://10.77.0.253  pydoc-lm" in ran.stderr


@pytest.mark.cluster
@pytest.mark.root
def test_commands_in_a_laboratory_find_its_cluster() -> None:
    script = f"{MEDUSA} cluster status && {MEDUSA} cluster deploy bad --model /nowhere"
    ran = lab("--nodes", "1", "--model", EXAMPLE, "--gateway-port", "18080", "--", "sh", "-c", script)
    assert ran.stdout.startswith("1 node\n  n1 10.77.0.1:8114 alive")
    assert "pydoc-lm: 0 of 0 to 1 instances" in ran.stdout
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (
        2,
        "medusa: --model: expected a URL, or a checkpoint's folder that is there on every node; /nowhere is not there "
        "[Config.Invalid]",
    )


@pytest.mark.cluster
@pytest.mark.root
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_after_a_signal(number: signal.Signals) -> None:
    command = [MEDUSA, "cluster", "lab", "--bare", "--nodes", "2", "--model", EXAMPLE]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr
        while "Ctrl-C ends it" not in process.stderr.readline():
            assert process.poll() is None
        started = descendants(process.pid)
        assert sum(name.startswith("lab-") for name in started.values()) == 4  # two nodes, the origin and the switch
        process.send_signal(number)
        process.wait()
    until(lambda: not any(alive(pid) for pid in started))
